"""The settings that no longer exist, for the errors about unknown names."""

from __future__ import annotations

REMOVED: dict[str, str] = {
    "algorithm.gae_backend": "training computes GAE in numpy on the host; `grpo gae --backend` chooses for a file",
    "algorithm.kl_horizon": "it is always 10,000 samples",
    "algorithm.mask_mode": "training skips tokens that the policy did not write; `grpo gae --mask-mode` has the others",
    "algorithm.vtrace_max_ratio": "V-trace clips its ratios at 1, as in the paper",
    "algorithm.vtrace_max_trace": "V-trace clips its traces at 1, as in the paper",
    "batching": "samples are always packed by best fit, and the prompt of a group once",
    "checkpoint.best_mode": "it follows from checkpoint.best_metric: lower lengths and counts are better",
    "critic.dynamic_microbatch": "critic.max_tokens_per_device and critic.rows_per_device select the micro-batches",
    "critic.revision": "critic.path names the revision, as in owner/name@v1.0",
    "data.revision": "data.source names the revision, as in hf:owner/name@v1.0",
    "env.environment": "it is called plugins.env_vars now, and reward functions get these variables, too",
    "env.episode_timeout_s": "all steps of a sample may take an hour together; env.step_timeout_s limits each",
    "env.load_timeout_s": "imports may take a minute",
    "env.memory_mib": "it is called plugins.memory_mib now, and applies to reward functions, too",
    "env.replayable": "samples of a lost process are played again, and dropped if they get another answer",
    "env.workers": "it is called plugins.workers now, and applies to reward functions, too",
    "mesh.heartbeat_s": "hosts stop 60 s after the last heartbeat of another",
    "model.revision": "model.path names the revision, as in owner/name@v1.0",
    "optimizer.max_nonfinite_steps": "a run stops after 3 updates in a row with a NaN or infinite loss or gradient",
    "reward.cpu_s": "plugins.timeout_s limits the duration of a call",
    "reward.environment": "it is called plugins.env_vars now, and environments get these variables, too",
    "reward.load_timeout_s": "imports may take a minute",
    "reward.max_characters": "functions get the last 100,000 characters of longer completions",
    "reward.memory_mib": "it is called plugins.memory_mib now, and applies to environments, too",
    "reward.model_revision": "reward.model names the revision, as in owner/name@v1.0",
    "reward.timeout_s": "it is called plugins.timeout_s now",
    "reward.workers": "it is called plugins.workers now, and applies to environments, too",
    "rollout.decode_layout": "weights are always gathered before generation, and rollout.mesh splits them over tp",
    "rollout.kv_block_size": "it follows from the devices, the longest sample and rollout.kv_blocks",
    "rollout.pdsr.max_moves": "after two moves adaptive leaves a sample where it is, and pdsr_v2 to heavy workers",
    "rollout.pdsr.probe_advance": "a probe may overtake 256 samples",
    "rollout.pdsr.probe_limit_s": "it is half of rollout.pdsr.fast_limit_s",
    "rollout.pdsr.steal_limit_s": "it is a quarter of rollout.pdsr.fast_limit_s",
    "rollout.pdsr.steal_limit_tokens": "it is a quarter of rollout.pdsr.fast_limit_tokens",
    "rollout.pdsr.tripped_share": "at most 12 % of a fast worker's slots are left at once",
    "rollout.pdsr.window_min": "lengths decide once 32 samples have finished",
    "rollout.pool": "rollout.ray.address (local, auto or host:port) makes workers Ray actors",
    "rollout.ray.fast": "rollout.ray.fast_resources is what Ray reserves for a worker, as in {CPU: 1, GPU: 1}",
    "rollout.ray.heavy": "rollout.ray.heavy_resources is what Ray reserves for a worker, as in {CPU: 1, GPU: 1}",
    "rollout.ray.start_timeout_s": "workers have 15 minutes to start and to compile",
    "rollout.segment.capacity": "a segment may fill the KV cache of the slots",
    "rollout.segment.overhead_steps": "ending a segment is assumed to take as long as half a decode step",
    "rollout.segment.rule": "it follows from whether samples wait for slots",
    "rollout.workers.deterministic": "rollout.mode: exact schedules a repeated rollout in the same way",
    "rollout.workers.fast.devices": "all workers have the same number of devices",
    "rollout.workers.heavy.devices": "all workers have the same number of devices",
    "rollout.workers.heavy.max_length": "heavy workers hold the longest samples",
    "rollout.workers.lease_s": "a worker has as long as it takes, and watchdog.phase_s limits the phase",
    "run.early_stopping.metric": "early stopping compares checkpoint.best_metric",
    "run.early_stopping.min_delta": "every change for the better counts; run.early_stopping.patience allows for noise",
    "run.early_stopping.mode": "it follows from checkpoint.best_metric: lower lengths and counts are better",
    "run.early_stopping.target": "run.early_stopping.patience ends a run whose evaluations no longer improve",
    "score.critic.dynamic": "score.critic.max_tokens_per_device or rows_per_device selects the micro-batches",
    "score.critic.strategy": "score.strategy is that of every role with fixed micro-batches",
    "score.policy.dynamic": "score.policy.max_tokens_per_device or rows_per_device selects the micro-batches",
    "score.policy.strategy": "score.strategy is that of every role with fixed micro-batches",
    "score.reference.dynamic": "score.reference.max_tokens_per_device or rows_per_device selects the micro-batches",
    "score.reference.strategy": "score.strategy is that of every role with fixed micro-batches",
    "score.reward.dynamic": "score.reward.max_tokens_per_device or rows_per_device selects the micro-batches",
    "score.reward.strategy": "score.strategy is that of every role with fixed micro-batches",
    "watchdog.compile_s": "watchdog.phase_s is the limit of every phase",
    "watchdog.evaluate_s": "watchdog.phase_s is the limit of every phase",
    "watchdog.reward_s": "watchdog.phase_s is the limit of every phase",
    "watchdog.rollout_s": "watchdog.phase_s is the limit of every phase",
    "watchdog.save_s": "watchdog.phase_s is the limit of every phase",
    "watchdog.score_s": "watchdog.phase_s is the limit of every phase",
    "watchdog.update_s": "watchdog.phase_s is the limit of every phase",
}
"""Maps a removed setting, or a removed section with all its settings, to what replaced it or why it is gone.

The error ends with "it no longer exists: " and this text, such as "it is called plugins.env_vars now".
"""


def explain_removal(name: str) -> str | None:
    """Returns why a setting, or the section that it was in, no longer exists; None if it never did."""
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((REMOVED[prefix] for prefix in prefixes if prefix in REMOVED), None)
