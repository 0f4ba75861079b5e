"""Tests the names on which other scripts rely: settings, historic names, metrics and fields of samples."""

from pathlib import Path

import pytest

from app.report.metric_registry import expand_braces, find_metric
from settings import load
from settings.loading.fields import FIELDS, value_of
from settings.loading.synonyms import ALIASES
from tests.program import records_of
from tests.replays import step_file

HISTORIC = {
    "steps=3": "run.steps",
    "training_steps=3": "run.steps",
    "batch_size=3": "rollout.prompts_per_step",
    "num_pre_q=3": "rollout.group_size",
    "max_length_sample=30": "rollout.max_new_tokens",
    "max_length_total=300": "rollout.max_length_total",
    "global_length=32": "rollout.prefill_length_min",
    "mesh_shape=1,-1,1": "mesh.shape",
    "model_path=builtin:tiny_tools": "model.path",
    "wandb_project=mine": "logging.wandb_project",
    "wandb_name=mine": "run.name",
    "wandb_mode=offline": "logging.wandb_mode",
    "rollout_logprob_mbs_per_gpu=3": "score.policy.rows_per_device",
    "ref_logprob_mbs_per_gpu=3": "score.reference.rows_per_device",
    "use_dynamic_bsz=false": "score.dynamic algorithm.dynamic_microbatch",
    "log_prob_use_dynamic_bsz=false": "score.dynamic",
    "ppo_max_token_len_per_gpu=3000": "algorithm.max_tokens_per_device",
    "ppo_infer_max_token_len_per_gpu=3000": "score.max_tokens_per_device",
    "log_prob_max_token_len_per_gpu=3000": "score.max_tokens_per_device",
    "forward_max_token_len_per_gpu=3000": "score.critic.max_tokens_per_device score.reward.max_tokens_per_device",
    "ppo_mini_batch_size=4": "algorithm.mini_batch_prompts",
    "balance_batch=false": "algorithm.balance_batch",
    "ppo_epochs=3": "algorithm.epochs",
    "beta=0.5": "algorithm.beta",
}
"""Maps a historic name with a value to the settings that get it."""

SETTINGS = """
run.{steps,seed,dir,name} model.{path,dtype} data.{source,max_prompt_length} rollout.{prompts_per_step,group_size}
rollout.{max_new_tokens,temperature,top_k,top_p,min_p,scheduler,mode,placement,max_staleness} score.{strategy,dynamic}
score.{rows_per_device,max_tokens_per_device} algorithm.{name,beta,clip_low,clip_high,loss_aggregation,gamma,lam}
optimizer.learning_rate mesh.{shape,cpu_devices,coordinator_address,num_processes,process_id,pretend}
checkpoint.{every_steps,keep} reward.{functions,on_error} eval.{every_steps,num_prompts,temperature} logging.wandb_mode
critic.learning_rate watchdog.phase_s env.{source,tools}
"""

METRICS = """
step loss reward/{mean,std,zero_variance_fraction} reward/gsm8k/mean completions/{mean,min,max}_length
completions/truncated_fraction policy/{entropy,kl,grad_norm,clip_fraction_low,clip_fraction_high,ratio_max}
policy/learning_rate value/{loss,clip_fraction,explained_variance} advantage/{mean,std}
eval/{accuracy,format_rate,truncated_fraction}
rollout/sampler_scorer_logprob_diff_{mean,max} batching/fill time/{rollout,reward,score,advantage,update,step}_s
perf/{tokens_per_s,mfu,peak_memory_bytes,compilations}
"""
SAMPLE_FIELDS = (
    *("step", "uid", "group_id", "sample_index", "prompt", "completion", "answer", "prompt_token_ids"),
    "completion_token_ids",
    *("behavior_logprobs", "kept_mass_logs", "policy_logprobs", "reference_logprobs", "reward", "rewards"),
    *("advantages", "finish_reason", "policy_version", "segments", "elapsed_s"),
)


@pytest.mark.parametrize("assignment", HISTORIC)
def test_a_historic_name_sets_its_settings_in_every_layer(assignment: str, tmp_path: Path) -> None:
    assert {one.partition("=")[0] for one in HISTORIC} == set(ALIASES)
    name, _, text = assignment.partition("=")
    (tmp_path / "c.yaml").write_text(f"{name}: {text}")
    by_environment = load(None, [], {name.upper(): text})
    layers = {
        "set": load(None, [assignment], {}),
        f"env:{name.upper()}": by_environment,
        f"yaml:{tmp_path / 'c.yaml'}:1": load(str(tmp_path / "c.yaml"), [], {}),
    }
    for field in HISTORIC[assignment].split():
        own = value_of(load(None, [f"{field}={text}"], {}).settings, field)
        assert own != value_of(load(None, [], {}).settings, field)
        for origin, resolved in layers.items():
            assert (value_of(resolved.settings, field), resolved.provenance[field]) == (own, origin)
    (notice,) = [notice for notice in by_environment.notices if name.upper() in notice]
    assert HISTORIC[assignment].split()[0] in notice


def test_settings_and_metrics_have_their_stable_names() -> None:
    assert {name for text in SETTINGS.split() for name in expand_braces(text)} <= FIELDS.keys()
    names = {name for text in METRICS.split() for name in expand_braces(text)}
    assert {name for name in names if find_metric(name) is None} == set()
    assert FIELDS["algorithm.max_tokens_per_device"].get_default() == 16384
    assert FIELDS["critic.max_tokens_per_device"].get_default() == 32768


def test_samples_of_a_run_have_the_stable_fields(uninterrupted: Path) -> None:
    record = records_of(step_file(uninterrupted, 1))[0]
    assert {*SAMPLE_FIELDS} <= record.keys()
