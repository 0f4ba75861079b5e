"""Names used by the historic runner and verl: unnested in YAML and `--set`, in upper case in the environment."""

from __future__ import annotations

ALIASES: dict[str, tuple[str, ...]] = {
    "steps": ("run.steps",),
    "training_steps": ("run.steps",),
    "batch_size": ("rollout.prompts_per_step",),
    "num_pre_q": ("rollout.group_size",),
    "max_length_sample": ("rollout.max_new_tokens",),
    "max_length_total": ("rollout.max_length_total",),
    "global_length": ("rollout.prefill_length_min",),
    "mesh_shape": ("mesh.shape",),
    "model_path": ("model.path",),
    "wandb_project": ("logging.wandb_project",),
    "wandb_name": ("run.name",),
    "wandb_mode": ("logging.wandb_mode",),
    "rollout_logprob_mbs_per_gpu": ("score.policy.rows_per_device",),
    "ref_logprob_mbs_per_gpu": ("score.reference.rows_per_device",),
    "use_dynamic_bsz": ("score.dynamic", "algorithm.dynamic_microbatch"),
    "log_prob_use_dynamic_bsz": ("score.dynamic",),
    "ppo_max_token_len_per_gpu": ("algorithm.max_tokens_per_device",),
    "ppo_infer_max_token_len_per_gpu": ("score.max_tokens_per_device",),
    "log_prob_max_token_len_per_gpu": ("score.max_tokens_per_device",),
    "forward_max_token_len_per_gpu": ("score.critic.max_tokens_per_device", "score.reward.max_tokens_per_device"),
    "ppo_mini_batch_size": ("algorithm.mini_batch_prompts",),
    "balance_batch": ("algorithm.balance_batch",),
    "ppo_epochs": ("algorithm.epochs",),
    "beta": ("algorithm.beta",),
}
"""Maps an alias to the dotted fields that receive its value."""
