"""Names of the historic runner, accepted flat in YAML and `--set`, and in upper case in the environment."""

from __future__ import annotations

HISTORIC: dict[str, str] = {
    "steps": "run.steps",
    "training_steps": "run.steps",
    "batch_size": "rollout.prompts_per_step",
    "num_pre_q": "rollout.group_size",
    "max_length_sample": "rollout.max_new_tokens",
    "max_length_total": "rollout.max_length_total",
    "global_length": "rollout.prefill_length_min",
    "mesh_shape": "mesh.shape",
    "model_path": "model.path",
    "wandb_project": "logging.wandb_project",
    "wandb_name": "run.name",
    "wandb_mode": "logging.wandb_mode",
    "rollout_logprob_mbs_per_gpu": "score.policy.rows_per_device",
    "ref_logprob_mbs_per_gpu": "score.reference.rows_per_device",
    "ppo_mini_batch_size": "algorithm.mini_batch_prompts",
}
"""Historic name -> dotted field."""
