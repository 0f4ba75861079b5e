"""Tests that every invalid setting gives one error with the value, the expectation and the source."""

import pytest

from settings import load
from settings.loading.fields import FIELDS, SECTIONS
from settings.loading.sources import env_name
from settings.loading.synonyms import ALIASES, HISTORIC_NAMES, REMOVED
from tests.settings.loading import load_text, refusal, rows_of, with_sets

BAD_SETS = rows_of(r"""
steps | --set steps: expected NAME=VALUE
=3 | expected NAME=VALUE
run.steps= | --set run.steps has no value; write null to leave the setting empty
run.steps=[1 | --set run.steps:1:3: not valid YAML
run.steps=abc | run.steps: expected a valid integer, got 'abc' (from --set)
run.steps=1e3 | expected a valid integer (write 1000), got 1000.0
run.steps=true | expected a valid integer, got True
run.steps=0 | expected greater than or equal to 1, got 0
run.seed=9223372036854775808 | fits in 64 bits
optimizer.learning_rate=.nan | expected a finite number, got nan
data.source=[] | data.source: expected at least 1 item, got []
data.source=[{source: a, weight: 0}] | data.source[0].weight: expected greater than 0, got 0
model.dtype=fp17 | expected 'float32' or 'bfloat16', got 'fp17'
data.source=[a, b, {source: a}] | data.source: expected different sources, but a occurs more than once
rollout.stop=[''] | rollout.stop[0]: expected at least one character, and no U+FFFD
rollout.stop=["a", "\uFFFD"] | rollout.stop[1]: expected at least one character, and no U+FFFD
rollout.slots=0 | rollout.slots: expected auto or an integer from 1 to 65536, got 0
rollout.kv_blocks=true | rollout.kv_blocks: expected auto, null or an integer from 1 to 2147483647, got True
rollout.devices=[] | rollout.devices: expected different device indices above 0
rollout.devices=[2, 2] | rollout.devices: expected different device indices above 0
rollout.devices=1 | rollout.devices: expected a fraction above 0 and below 1
rollout.mesh=dp=2 | rollout.mesh: expected `auto`, `training`, or sizes as in `dp=2,tp=4` or `tp=4`
rollout.ray.address=ray://head:10001 | rollout.ray.address: expected `auto`, `local`, or `host:port` of a cluster's head
reward.functions=[] | reward.functions: expected at least one function, got [] (from --set)
reward.functions=[gsm8] | reward.functions[0]: unknown reward `gsm8`, expected one of gsm8k, arithmetic,
reward.functions=a:f,b.py:g | expected a list for several functions, such as [a:f, b.py:g], got 'a:f,b.py:g'
reward.functions=['my module:f'] | functions[0].function: expected `module:name` or `path/to/file.py:name`
reward.functions=rewards.py | functions[0]: expected a function, as in rewards.py:FUNCTION, got
reward.functions=[a:f, b.py:f] | ; name a plug-in as in `{name: other,
reward.functions=[{name: gsm8k, function: a:f}] | expected a plug-in's own name, but `gsm8k` is a built-in reward, got
reward.functions=[{name: a/b, function: a:f}] | functions[0].name: expected 1 to 64 letters, digits, `_` or `-`
env.source=a.py:2x | env.source: expected one of calculator, guess_number, `module:name` or
plugins.env_vars=[a b] | expected names of letters, digits and `_` that do not start with a digit, but one is `a b`
plugins.env_vars=[WANDB_API_KEY] | expected no secrets, but WANDB_API_KEY is one
model.lora.targets=[q_proj, k_prj] | up_proj or down_proj (did you mean k_proj?), got 'k_prj'
mesh.shape=1,0,1 | three sizes `dp,fsdp,tp`
mesh.shape=-1,-1,1 | at most one -1
mesh.coordinator_address=localhost | expected `host:port`
mesh.coordinator_address=localhost:65536 | a port from 1 to 65535
run.name=../../etc/x | expected 1 to 100 letters
run=3 | run (--set) is a section; set one of its settings
steps=1 & run.steps=2 | run.steps is set twice: steps (--set) and run.steps (--set); keep one of them
learning_rat=1 | did you mean critic.learning_rate or optimizer.learning_rate?
data.source=[{source: a, wieght: 1}] | unknown setting data.source[0].wieght (from --set); did you mean weight?
ppo_infer_max_token_len_per_gpu=-1 | score.max_tokens_per_device: expected greater than or equal to 1, got -1
score.strategy=off & score.rows_per_device=4 | selects one pass over all samples, but score.rows_per_device = 4
  (from --set) selects several; remove score.rows_per_device, or set score.strategy to loop or scan
wandb_api_key=x | is a secret; set WANDB_API_KEY in the environment or a .env
""")


@pytest.mark.parametrize(("overrides", "message"), [*BAD_SETS, [f"run.name={'a' * 101}", "expected 1 to 100 letters"]])
def test_an_invalid_override_is_refused_in_one_line(overrides: str, message: str) -> None:
    told = refusal(with_sets, *overrides.split(" & "))
    assert message in told and len(told.splitlines()) == 1


BAD_FILES = rows_of(r"""
num_pre_q: 0 | rollout.group_size: expected greater than or equal to 1, got 0 (from yaml:c.yaml:2)
reward: {functions: [gsm8k, {name: x}]} | reward.functions[1]: unknown reward `x`
rolout: {} | unknown setting rolout (yaml:c.yaml:2); did you mean rollout?
group_size: 4 | unknown setting group_size (yaml:c.yaml:2); did you mean rollout.group_size?
score: {policy: 3} | score.policy (yaml:c.yaml:2) is a section; set one of its settings, such as score.policy.
{batch_size: 4, rollout: {prompts_per_step: 4}} | rollout.prompts_per_step is set twice: batch_size (yaml:c.yaml:2) and
  rollout.prompts_per_step (yaml:c.yaml:2); keep one of them
{use_dynamic_bsz: true, log_prob_use_dynamic_bsz: false} | score.dynamic is set twice: use_dynamic_bsz (yaml:c.yaml:2)
{use_dynamic_bsz: true, algorithm: {dynamic_microbatch: true}} | algorithm.dynamic_microbatch is set twice
<<: {run: {steps: 3}} | unknown setting <<
critic: {optim: {lr: 1e-5}} | verl's critic.optim.lr is critic.learning_rate here
""")


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_an_invalid_setting_in_a_file_is_refused_with_its_line(text: str, message: str) -> None:
    assert message in refusal(load_text, f"# The first line\n{text}")


UNKNOWN_NAMES = rows_of("""
num-generations | TRL's num_generations is rollout.group_size here
algorithm.num_generations | TRL's num_generations is rollout.group_size here
actor_rollout_ref.rollout.n | verl's rollout.n is rollout.group_size here
actor_rollout_ref.rollout.temperature | did you mean rollout.temperature?
actor.optim.betas | verl's actor.optim.betas is optimizer.beta1 and optimizer.beta2 here
critic.lr | verl's critic.optim.lr is critic.learning_rate here
lr | verl's actor.optim.lr is optimizer.learning_rate here and verl's critic.optim.lr is critic.learning_rate here
vllm_mode | TRL's vllm_* has no counterpart here: generation always uses the built-in engine
num_train_epochs | TRL's num_train_epochs is run.steps here: epochs x prompts of the data / prompts of a step
top_p | did you mean rollout.top_p?
score.polcy.rows_per_device | did you mean score.policy.rows_per_device?
run.epochs | `grpo settings run` lists the settings
foo.bar | `grpo settings` lists the settings
""")


@pytest.mark.parametrize(("name", "suggestion"), UNKNOWN_NAMES)
def test_error_about_an_unknown_setting_suggests_a_name_only_if_one_is_close(name: str, suggestion: str) -> None:
    message = refusal(with_sets, f"{name}=1")
    assert message.startswith(f"unknown setting {name} (--set); {suggestion}"), message


@pytest.mark.parametrize("text", ["run: {stepz: 1}\nmodel: {pth: x}\n", "run: {steps: a}\nmodel: {dtype: b}\n"])
def test_all_unknown_settings_and_wrong_values_are_listed_at_once(text: str) -> None:
    assert len(refusal(load_text, text).splitlines()) == 2


def test_a_config_file_of_another_program_gives_a_short_error() -> None:
    text = "trainer: {" + ", ".join(f"option_{number}: 1" for number in range(40)) + "}"
    lines = refusal(load_text, text).splitlines()
    assert lines[0].startswith("unknown setting trainer.option_0 (yaml:c.yaml:1)")
    assert (len(lines), lines[-1]) == (11, "and 30 more")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"STEPS": "abc"}, "run.steps: expected a valid integer, got 'abc' (from env:STEPS)"),
        ({"GRPO__RUN__STEPS": " "}, "environment variable GRPO__RUN__STEPS has no value"),
        ({"STEPS": "1", "GRPO__RUN__STEPS": "1"}, "run.steps is set twice"),
        ({"GRPO__GROUP_SIZE": "1"}, "(names are GRPO__SECTION__FIELD); did you mean GRPO__ROLLOUT__GROUP_SIZE?"),
        ({"GRPO__run__steps": "1"}, "did you mean GRPO__RUN__STEPS?"),
        ({"GRPO__RUN": "{steps: 3}"}, "GRPO__RUN (names are GRPO__SECTION__FIELD); did you mean GRPO__RUN__*?"),
        ({"GRPO__NUM_GENERATIONS": "8"}, "); TRL's num_generations is GRPO__ROLLOUT__GROUP_SIZE here"),
        ({"BATCH_SIZE": "[1"}, "environment variable BATCH_SIZE:1:3: not valid YAML"),
    ],
)
def test_an_invalid_environment_variable_is_refused(environ: dict[str, str], message: str) -> None:
    assert message in refusal(load, None, [], environ)


@pytest.mark.parametrize("name", [*REMOVED, *HISTORIC_NAMES])
def test_a_setting_that_no_longer_exists_is_refused_with_the_reason(name: str) -> None:
    reason = REMOVED.get(name, "has no counterpart here: micro-batches follow from the token quota")
    variable = env_name(name)
    assert name not in {*FIELDS, *SECTIONS, *ALIASES}
    section, dot, last = name.partition(".")
    for message in (
        refusal(load_text, f"{section}: {{{last}: 1}}" if dot else f"{name}: 1"),
        refusal(with_sets, f"{name}=1"),
        refusal(load, None, [], {variable: "1"}),
    ):
        assert (name in message or variable in message) and reason in message
    assert name in HISTORIC_NAMES or reason in refusal(with_sets, f"{name}.inside=1")
