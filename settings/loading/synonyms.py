"""What TRL and verl call our settings, for the errors about unknown names: the tables of sops/migrate/ by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

TABLE = """
model.path | model, model_name_or_path, actor_rollout_ref.model.path
data.source | train_dataset, dataset_name, data.train_files
data.eval_source | eval_dataset, data.val_files
data.shuffle | shuffle_dataset
reward.functions | reward_funcs, reward_weights, custom_reward_function.path, custom_reward_function.name
rollout.group_size | num_generations, rollout.n
eval.num_samples | num_generations_eval, rollout.val_kwargs.n
rollout.max_new_tokens | max_completion_length, data.max_response_length
rollout.temperature | temperature
rollout.top_p | top_p
rollout.top_k | top_k
rollout.min_p | min_p
data.chat_template_kwargs | chat_template_kwargs, data.apply_chat_template_kwargs
rollout.stop | generation_kwargs, stop_strings
rollout.prompts_per_step | generation_batch_size | generation_batch_size / num_generations / hosts
rollout.prompts_per_step | steps_per_generation, per_device_train_batch_size | \
    per_device_train_batch_size x devices x steps_per_generation / num_generations / hosts
algorithm.mini_batch_prompts | gradient_accumulation_steps | \
    per_device_train_batch_size x devices x gradient_accumulation_steps / num_generations / hosts
algorithm.epochs | num_iterations, actor.ppo_epochs
algorithm.loss_aggregation | loss_type, actor.loss_agg_mode
algorithm.estimator | scale_rewards, algorithm.norm_adv_by_std_in_grpo
algorithm.ratio_level | importance_sampling_level
algorithm.clip_low | epsilon, actor.clip_ratio_low
algorithm.clip_high | epsilon_high, actor.clip_ratio_high
algorithm.dual_clip | delta, actor.clip_ratio_c
algorithm.beta | beta, actor.use_kl_loss, actor.kl_loss_coef, algorithm.use_kl_in_reward, algorithm.kl_ctrl.kl_coef
algorithm.entropy_coef | entropy_coef, actor.entropy_coeff
algorithm.correction | vllm_importance_sampling_correction, algorithm.rollout_correction.rollout_is
algorithm.correction_level | vllm_importance_sampling_mode
algorithm.correction_max | vllm_importance_sampling_clip_max, algorithm.rollout_correction.rollout_is_threshold
algorithm.correction_min | vllm_importance_sampling_clip_min
optimizer.learning_rate | learning_rate, actor.optim.lr
optimizer.schedule | lr_scheduler_type, actor.optim.lr_scheduler_type
optimizer.warmup_steps | warmup_steps, actor.optim.lr_warmup_steps
optimizer.beta1 | adam_beta1
optimizer.beta2 | adam_beta2
optimizer.epsilon | adam_epsilon
optimizer.weight_decay | weight_decay, actor.optim.weight_decay
optimizer.max_grad_norm | max_grad_norm, actor.grad_clip
run.steps | max_steps | a step here is a rollout with all its optimizer steps
run.steps | num_train_epochs, trainer.total_epochs | epochs x prompts of the data / prompts of a step
model.dtype | bf16, actor.fsdp_config.dtype
model.remat | gradient_checkpointing, actor_rollout_ref.model.enable_gradient_checkpointing
model.attention | attn_implementation
model.lora.rank model.lora.alpha model.lora.targets | peft_config
model.lora.rank | r, actor_rollout_ref.model.lora_rank
model.lora.alpha | lora_alpha, actor_rollout_ref.model.lora_alpha
model.lora.targets | target_modules, actor_rollout_ref.model.target_modules
model.logits_chunk | use_liger_kernel
run.seed | seed, data.seed
run.dir | output_dir, trainer.default_local_dir
run.name | run_name, trainer.experiment_name
checkpoint.every_steps | save_steps, trainer.save_freq
checkpoint.keep | save_total_limit, trainer.max_actor_ckpt_to_keep
checkpoint.best_metric | metric_for_best_model
eval.every_steps | eval_strategy, eval_steps, trainer.val_before_train, trainer.test_freq
run.early_stopping.patience | early_stopping_patience
logging.wandb_project logging.tensorboard | report_to, trainer.logger
logging.completions_every_steps | log_completions, logging_steps, trainer.log_val_generations
– | multi_objective_aggregation | always sum_then_normalize
– | repetition_penalty, use_bias_correction_kl, use_adaptive_entropy, top_entropy_quantile, off_policy_mask_threshold
– | use_vllm, vllm_* | rollout.slots is continuous batching, the default for real models
– | sync_ref_model | the reference is the starting model
– | mask_truncated_completions | reward.overlong_buffer penalizes length instead
– | resume_from_checkpoint | use --resume auto
data.prompt_column | data.prompt_key
rollout.prompts_per_step | data.train_batch_size | train_batch_size / hosts
data.overlong_prompts | data.truncation, data.filter_overlong_prompts
reward.model | reward_model.enable, reward_model.model.path
reward.overlong_buffer | reward_kwargs.overlong_buffer_cfg.len
reward.overlong_penalty | reward_kwargs.overlong_buffer_cfg.penalty_factor
rollout.slots | rollout.max_num_seqs
eval.temperature | rollout.val_kwargs.temperature
rollout.max_staleness | trainer.v1.trainer_mode, trainer.v1.sampler.max_off_policy_threshold
rollout.devices | rollout.n_gpus_per_node
algorithm.name | algorithm.adv_estimator, actor.policy_loss.loss_mode
algorithm.mini_batch_prompts | actor.ppo_mini_batch_size | ppo_mini_batch_size / hosts
algorithm.shuffle | actor.shuffle
algorithm.clip_low algorithm.clip_high | actor.clip_ratio
algorithm.kl_estimator | actor.kl_loss_type
algorithm.kl_target | algorithm.kl_ctrl.type, algorithm.kl_ctrl.target_kl
– | algorithm.kl_ctrl.horizon | always 10000
algorithm.filter | algorithm.filter_groups.enable
algorithm.max_rounds | algorithm.filter_groups.max_num_gen_batches
algorithm.correction_veto | algorithm.rollout_correction.rollout_rs
critic.path | critic.model.path
critic.learning_rate | critic.optim.lr
critic.clip_range | critic.cliprange_value
critic.warmup_steps | trainer.critic_warmup
critic.max_tokens_per_device | critic.ppo_max_token_len_per_gpu
algorithm.dynamic_microbatch score.dynamic | actor.use_dynamic_bsz
algorithm.max_tokens_per_device | actor.ppo_max_token_len_per_gpu
algorithm.rows_per_device | actor.ppo_micro_batch_size_per_gpu
critic.rows_per_device | critic.ppo_micro_batch_size_per_gpu
score.critic.rows_per_device | critic.forward_micro_batch_size_per_gpu
score.dynamic | rollout.log_prob_use_dynamic_bsz
score.max_tokens_per_device | rollout.log_prob_max_token_len_per_gpu, actor.ppo_infer_max_token_len_per_gpu
score.policy.rows_per_device | rollout.log_prob_micro_batch_size_per_gpu
score.reference.rows_per_device | ref.log_prob_micro_batch_size_per_gpu
score.critic.max_tokens_per_device | critic.forward_max_token_len_per_gpu
algorithm.balance_batch | trainer.balance_batch
optimizer.final_fraction | actor.optim.min_lr_ratio
optimizer.beta1 optimizer.beta2 | actor.optim.betas
mesh.shape | actor.strategy, actor.fsdp_config.fsdp_size
rollout.mesh | rollout.tensor_model_parallel_size | tp=N
score.reference.offload | ref.fsdp_config.param_offload
optimizer.offload | actor.fsdp_config.optimizer_offload
mesh.expect_processes | trainer.nnodes, trainer.n_gpus_per_node
run.steps | trainer.total_training_steps
eval.num_prompts | data.val_max_samples
logging.wandb_project | trainer.project_name
logging.save_rollouts | trainer.rollout_data_dir
rollout.kv_blocks | rollout.gpu_memory_utilization | what the memory holds
rollout.kv_cache | rollout.engine_kwargs.vllm.kv_cache_dtype | int8 or null
rollout.routing_replay | rollout.enable_rollout_routing_replay, actor.megatron.router_replay.mode | true is R3
– | rollout.free_cache_engine | caches exist during the rollout
– | trainer.resume_mode | use --resume auto; without it an occupied run directory is refused
– | grad_accum_steps | \
    micro-batches follow from the token quota algorithm.max_tokens_per_device and change no result; \
    for several optimizer steps per rollout, set algorithm.mini_batch_prompts
"""
"""One line each: settings here, or `–` if there are none | names or patterns of the other programs | remark.

A pattern comes after the names that it matches. `actor`, `ref` and `rollout` are inside verl's `actor_rollout_ref`.
"""

HISTORIC_NAMES = ("grad_accum_steps",)
"""Names of the historic runner that have no field in `ALIASES`. Of the others, those with a dot are verl's."""
VERL_ROOT = "actor_rollout_ref."


class Synonym(NamedTuple):
    """A setting of another program."""

    title: str
    """Such as `TRL's num_generations`."""
    fields: tuple[str, ...]
    """The settings that it is here; empty if there are none."""
    remark: str
    """How to convert its value, or what there is instead; may be empty."""


def _read_table() -> Iterator[tuple[str, Synonym]]:
    for line in TABLE.strip().splitlines():
        here, names, *remark = (" ".join(cell.split()) for cell in line.split("|"))
        for name in names.split(", "):
            program = "the historic runner" if name in HISTORIC_NAMES else "verl" if "." in name else "TRL"
            fields = () if here == "–" else tuple(here.split())
            yield name.removeprefix(VERL_ROOT), Synonym(f"{program}'s {name}", fields, "".join(remark))


SYNONYMS = dict(_read_table())


def find_synonyms(name: str, sections: Collection[str]) -> tuple[list[Synonym], bool]:
    """Returns the settings of other programs that a name may be, and whether it is exactly one.

    Otherwise they have the same last part and share most of the other parts. A short name inside one of our `sections`
    must share a part: `critic.lr` is verl's `critic.optim.lr`, but `critic.epsilon` is not TRL's `epsilon`.
    """
    for theirs, synonym in SYNONYMS.items():
        if fnmatchcase(name, theirs):
            return [synonym], True
    *parts, last = name.split(".")
    shared = {
        theirs: len({*parts} & {*".".join((theirs, *synonym.fields)).split(".")})
        for theirs, synonym in SYNONYMS.items()
        if theirs.rpartition(".")[2] == last
    }
    is_clear = not parts or parts[0] not in sections or "_" in last
    most = max(shared.values(), default=0)
    return [SYNONYMS[theirs] for theirs, number in shared.items() if number == most and (number or is_clear)], False
