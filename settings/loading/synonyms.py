"""What TRL and verl call our settings, for the errors about unknown names: the tables of sops/migrate/ by name."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

TRL_NAMES = {
    "model": "model.path",
    "model_name_or_path": "model.path",
    "train_dataset": "data.source",
    "dataset_name": "data.source",
    "eval_dataset": "data.eval_source",
    "shuffle_dataset": "data.shuffle",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.functions",
    "num_generations": "rollout.group_size",
    "num_generations_eval": "eval.num_samples",
    "max_completion_length": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "generation_kwargs": "rollout.stop",
    "stop_strings": "rollout.stop",
    "generation_batch_size": "rollout.prompts_per_step",
    "steps_per_generation": "rollout.prompts_per_step",
    "gradient_accumulation_steps": "algorithm.mini_batch_prompts",
    "per_device_train_batch_size": "algorithm.rows_per_device",
    "num_iterations": "algorithm.epochs",
    "loss_type": "algorithm.loss_aggregation",
    "scale_rewards": "algorithm.estimator",
    "importance_sampling_level": "algorithm.ratio_level",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "delta": "algorithm.dual_clip",
    "beta": "algorithm.beta",
    "entropy_coef": "algorithm.entropy_coef",
    "vllm_importance_sampling_correction": "algorithm.correction",
    "vllm_importance_sampling_mode": "algorithm.correction_level",
    "vllm_importance_sampling_clip_max": "algorithm.correction_max",
    "vllm_importance_sampling_clip_min": "algorithm.correction_min",
    "learning_rate": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "warmup_steps": "optimizer.warmup_steps",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.epsilon",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.max_grad_norm",
    "max_steps": "run.steps",
    "num_train_epochs": "run.steps",
    "bf16": "model.dtype",
    "gradient_checkpointing": "model.remat",
    "peft_config": "model.lora.rank model.lora.alpha model.lora.targets",
    "r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "target_modules": "model.lora.targets",
    "use_liger_kernel": "model.logits_chunk",
    "seed": "run.seed",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "metric_for_best_model": "checkpoint.best_metric",
    "greater_is_better": "checkpoint.best_mode",
    "eval_strategy": "eval.every_steps",
    "eval_steps": "eval.every_steps",
    "early_stopping_patience": "run.early_stopping.patience",
    "early_stopping_threshold": "run.early_stopping.min_delta",
    "report_to": "logging.wandb_project logging.tensorboard",
    "log_completions": "logging.completions_every_steps",
    "logging_steps": "logging.completions_every_steps",
    "multi_objective_aggregation": "– always sum_then_normalize",
    "repetition_penalty": "–",
    "use_vllm": "– rollout.slots and rollout.scheduler enable continuous batching",
    "vllm_*": "– rollout.slots and rollout.scheduler enable continuous batching",
    "use_bias_correction_kl": "–",
    "sync_ref_model": "– the reference is the starting model",
    "use_adaptive_entropy": "–",
    "top_entropy_quantile": "–",
    "mask_truncated_completions": "– reward.overlong_buffer penalizes length instead",
    "off_policy_mask_threshold": "–",
    "resume_from_checkpoint": "– use --resume auto",
}
"""Maps a setting of TRL, or a pattern, to the dotted settings that it is here, separated by spaces, or to `–` and a
remark if there are none."""

VERL_NAMES = {
    "data.train_files": "data.source",
    "data.val_files": "data.eval_source",
    "data.prompt_key": "data.prompt_column",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
    "data.max_response_length": "rollout.max_new_tokens",
    "data.truncation": "data.overlong_prompts",
    "data.filter_overlong_prompts": "data.overlong_prompts",
    "data.seed": "run.seed",
    "custom_reward_function.path": "reward.functions",
    "custom_reward_function.name": "reward.functions",
    "reward_model.enable": "reward.model",
    "reward_model.model.path": "reward.model",
    "reward_kwargs.overlong_buffer_cfg.len": "reward.overlong_buffer",
    "reward_kwargs.overlong_buffer_cfg.penalty_factor": "reward.overlong_penalty",
    "rollout.n": "rollout.group_size",
    "rollout.max_num_seqs": "rollout.slots",
    "rollout.val_kwargs.temperature": "eval.temperature",
    "rollout.val_kwargs.n": "eval.num_samples",
    "trainer.v1.trainer_mode": "rollout.max_staleness",
    "trainer.v1.sampler.max_off_policy_threshold": "rollout.max_staleness",
    "algorithm.adv_estimator": "algorithm.name",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.estimator",
    "actor.ppo_mini_batch_size": "algorithm.mini_batch_prompts",
    "actor.ppo_epochs": "algorithm.epochs",
    "actor.shuffle": "algorithm.shuffle",
    "actor.clip_ratio": "algorithm.clip_low algorithm.clip_high",
    "actor.clip_ratio_low": "algorithm.clip_low",
    "actor.clip_ratio_high": "algorithm.clip_high",
    "actor.clip_ratio_c": "algorithm.dual_clip",
    "actor.policy_loss.loss_mode": "algorithm.name",
    "actor.loss_agg_mode": "algorithm.loss_aggregation",
    "actor.entropy_coeff": "algorithm.entropy_coef",
    "actor.use_kl_loss": "algorithm.beta",
    "actor.kl_loss_coef": "algorithm.beta",
    "actor.kl_loss_type": "algorithm.kl_estimator",
    "algorithm.use_kl_in_reward": "algorithm.beta",
    "algorithm.kl_ctrl.kl_coef": "algorithm.beta",
    "algorithm.kl_ctrl.type": "algorithm.kl_target",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl_target",
    "algorithm.kl_ctrl.horizon": "algorithm.kl_horizon",
    "algorithm.filter_groups.enable": "algorithm.filter",
    "algorithm.filter_groups.max_num_gen_batches": "algorithm.max_rounds",
    "algorithm.rollout_correction.rollout_is": "algorithm.correction",
    "algorithm.rollout_correction.rollout_is_threshold": "algorithm.correction_max",
    "algorithm.rollout_correction.rollout_rs": "algorithm.correction_veto",
    "critic.model.path": "critic.path",
    "critic.optim.lr": "critic.learning_rate",
    "critic.cliprange_value": "critic.clip_range",
    "trainer.critic_warmup": "critic.warmup_steps",
    "critic.ppo_max_token_len_per_gpu": "critic.max_tokens_per_device",
    "actor.use_dynamic_bsz": "algorithm.dynamic_microbatch score.dynamic",
    "actor.ppo_max_token_len_per_gpu": "algorithm.max_tokens_per_device",
    "actor.ppo_micro_batch_size_per_gpu": "algorithm.rows_per_device",
    "rollout.log_prob_use_dynamic_bsz": "score.dynamic",
    "rollout.log_prob_max_token_len_per_gpu": "score.max_tokens_per_device",
    "actor.ppo_infer_max_token_len_per_gpu": "score.max_tokens_per_device",
    "rollout.log_prob_micro_batch_size_per_gpu": "score.policy.rows_per_device",
    "ref.log_prob_micro_batch_size_per_gpu": "score.reference.rows_per_device",
    "critic.forward_max_token_len_per_gpu": "score.critic.max_tokens_per_device",
    "trainer.balance_batch": "algorithm.balance_batch",
    "actor.optim.lr": "optimizer.learning_rate",
    "actor.optim.lr_scheduler_type": "optimizer.schedule",
    "actor.optim.min_lr_ratio": "optimizer.final_fraction",
    "actor.optim.lr_warmup_steps": "optimizer.warmup_steps",
    "actor.optim.weight_decay": "optimizer.weight_decay",
    "actor.optim.betas": "optimizer.beta1 optimizer.beta2",
    "actor.grad_clip": "optimizer.max_grad_norm",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.remat",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "actor_rollout_ref.model.target_modules": "model.lora.targets",
    "actor.fsdp_config.dtype": "model.dtype",
    "actor.strategy": "mesh.shape",
    "actor.fsdp_config.fsdp_size": "mesh.shape",
    "rollout.tensor_model_parallel_size": "mesh.shape",
    "ref.fsdp_config.param_offload": "score.reference.offload",
    "trainer.nnodes": "mesh.expect_processes",
    "trainer.n_gpus_per_node": "mesh.expect_processes",
    "trainer.total_training_steps": "run.steps",
    "trainer.total_epochs": "run.steps",
    "trainer.val_before_train": "eval.every_steps",
    "trainer.test_freq": "eval.every_steps",
    "data.val_max_samples": "eval.num_prompts",
    "trainer.save_freq": "checkpoint.every_steps",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.default_local_dir": "run.dir",
    "trainer.experiment_name": "run.name",
    "trainer.project_name": "logging.wandb_project",
    "trainer.logger": "logging.wandb_project logging.tensorboard",
    "trainer.rollout_data_dir": "logging.save_rollouts",
    "trainer.log_val_generations": "logging.completions_every_steps",
    "rollout.gpu_memory_utilization": "– caches exist during the rollout",
    "rollout.free_cache_engine": "– caches exist during the rollout",
    "trainer.resume_mode": "– use --resume auto; without it an occupied run directory is refused",
}
"""Maps a setting of verl to ours, as `TRL_NAMES` does. `actor`, `ref` and `rollout` are inside `actor_rollout_ref`."""

HISTORIC_NAMES = {
    "grad_accum_steps": "– micro-batches follow from the token quota algorithm.max_tokens_per_device and change no "
    "result; for several optimizer steps per rollout, set algorithm.mini_batch_prompts",
}
"""Names of the historic runner that have no field in `ALIASES`, as in `TRL_NAMES`."""

VERL_ROOT = "actor_rollout_ref."
SYNONYMS = {
    (f"{program}'s {name}", name.removeprefix(VERL_ROOT)): here
    for program, names in (("TRL", TRL_NAMES), ("verl", VERL_NAMES), ("the historic runner", HISTORIC_NAMES))
    for name, here in names.items()
}
"""Maps (title, name) of every setting of the other programs to what it is here."""


def find_synonyms(name: str, sections: Collection[str]) -> tuple[dict[str, str], bool]:
    """Returns title -> counterpart of the other programs' settings that a name may be, and whether it is exactly one.

    Otherwise they have the same last part and share most of the other parts. A short name inside one of our `sections`
    must share a part: `critic.lr` is verl's `critic.optim.lr`, but `critic.epsilon` is not TRL's `epsilon`.
    """
    for (title, theirs), here in SYNONYMS.items():  # a pattern comes after the names that it matches
        if fnmatchcase(name, theirs):
            return {title: here}, True
    *parts, last = name.split(".")
    shared = {
        (title, here): len({*parts} & {*f"{theirs} {here}".replace(" ", ".").split(".")})
        for (title, theirs), here in SYNONYMS.items()
        if theirs.rpartition(".")[2] == last
    }
    is_clear = not parts or parts[0] not in sections or "_" in last
    most = max(shared.values(), default=0)
    return dict(synonym for synonym, number in shared.items() if number == most and (number or is_clear)), False
