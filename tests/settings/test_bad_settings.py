"""Tests that every invalid setting gives one error with the value, the expectation and the source."""

from __future__ import annotations

from pathlib import Path

import pytest

from settings import InputError, load
from tests.settings.loading import load_text, with_sets

BAD_SETS = [
    ("steps", "expected NAME=VALUE"),
    ("=3", "expected NAME=VALUE"),
    ("run.steps=", "has no value"),
    ("run.steps=abc", "run.steps: expected a valid integer, got 'abc' (from --set)"),
    ("run.steps=1e3", "expected a valid integer (write 1000), got 1000.0"),
    ("run.steps=true", "expected a valid integer, got True"),
    ("run.steps=0", "expected greater than or equal to 1, got 0"),
    ("run.seed=1180591620717411303424", "fits in 64 bits"),
    ("optimizer.learning_rate=.nan", "expected a finite number, got nan"),
    ("data.source=[]", "data.source: list should have at least 1 item after validation, not 0, got []"),
    ("data.source=[{source: a, weight: 0}]", "data.source[0].weight: expected greater than 0, got 0"),
    (
        "data.source=[{source: a, wieght: 1}]",
        "unknown setting data.source[0].wieght (from --set); did you mean weight?",
    ),
    (
        "data.source=[{source: a}, {source: b}, {source: a}]",
        "data.source: expected different sources, but a occurs more",
    ),
    ("rollout.stop=['']", "rollout.stop[0]: expected at least one character, and no U+FFFD"),
    ('rollout.stop=["a", "\\uFFFD"]', "rollout.stop[1]: expected at least one character, and no U+FFFD"),
    ("model.dtype=fp17", "expected 'float32' or 'bfloat16', got 'fp17'"),
    ("data.difficulty=[1, 9]", "data.difficulty[1]: expected less than or equal to 3, got 9"),
    ("reward.functions=[gsm8]", "reward.functions[0]: unknown reward `gsm8`, expected one of gsm8k, arithmetic,"),
    ("reward.functions=a:f,b.py:g", "expected a list for several functions, such as [a:f, b.py:g], got 'a:f,b.py:g'"),
    ("reward.functions=[{weight: 2}]", "reward.functions[0].name: field required"),
    ("reward.functions=['my module:f']", "functions[0].function: expected `module:name` or `path/to/file.py:n"),
    ("reward.functions=rewards.py", "functions[0]: rewards.py names no function; write rewards.py:FUNCTION"),
    ("reward.functions=['brevity.py:']", "expected `module:name` or `path/to/file.py:name`"),
    ("reward.functions=[a:f, b.py:f]", "`f` occurs 2 times; name a plug-in as in `{name: other,"),
    ("reward.functions=[{name: gsm8k, function: a:f}]", "`gsm8k` is the name of a built-in reward; give the plug-in"),
    ("reward.functions=[{name: a/b, function: a:f}]", "functions[0].name: expected at most 64 letters, digits, `_`"),
    ("plugins.env_vars=[a b]", "expected names of environment variables, but `a b` is not one"),
    ("plugins.env_vars=[WANDB_API_KEY]", "expected no secrets, but WANDB_API_KEY is one"),
    ("mesh.shape=''", "three sizes `dp,fsdp,tp`"),
    ("mesh.shape=-1,-1,1", "at most one -1"),
    ("mesh.coordinator_address=localhost", "expected `host:port`"),
    ("mesh.coordinator_address=localhost:0", "a port from 1 to 65535"),
    ("run.name=../../etc/x", "expected at most 100 letters"),
    ('run.name="a\\0b"', "expected at most 100 letters"),
    (f"run.name={'a' * 101}", "expected at most 100 letters"),
    ("run=3", "run (--set) is a section; set one of its settings"),
    ("optimizer.name=adamw", "unknown setting optimizer.name (--set); `grpo settings optimizer` lists the settings"),
    ("learning_rat=1", "did you mean critic.learning_rate or optimizer.learning_rate?"),
    ("temperature=1", "unknown setting temperature (--set); did you mean rollout.temperature?"),
    ("score.polcy.rows_per_device=1", "did you mean score.policy.rows_per_device?"),
    ("ppo_infer_max_token_len_per_gpu=-1", "score.max_tokens_per_device: expected greater than or equal to 1, got -1"),
    ("wandb_api_key=x", "is a secret; set WANDB_API_KEY in the environment or a .env"),
    ("run.steps=[1", "--set run.steps:1:3: not valid YAML"),
    ("run.steps=!!python/name:os.system", "tags such as"),
]


@pytest.mark.parametrize(("override", "message"), BAD_SETS)
def test_a_bad_set_is_refused(override: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        with_sets(override)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n  steps: abc\n", "run.steps: expected a valid integer, got 'abc' (from yaml:c.yaml:2)"),
        (
            "# x\nnum_pre_q: 0\n",
            "rollout.group_size: expected greater than or equal to 1, got 0 (from yaml:c.yaml:2)",
        ),
        ("reward:\n  functions:\n    - gsm8k\n    - name: x\n", "reward.functions[1]: unknown reward `x`"),
        ("reward:\n  functions:\n    - gsm8k\n    - name: x\n", "(from yaml:c.yaml:2)"),
        (
            "rollout:\n  groop_size: 4\n",
            "rollout.groop_size (yaml:c.yaml:2); did you mean rollout.group_size?",
        ),
        (
            "score:\n  policy:\n    row_per_device: 4\n",
            "score.policy.row_per_device (yaml:c.yaml:3); did you mean",
        ),
        ("rollouts:\n  group_size: 4\n", "rollouts.group_size (yaml:c.yaml:2); did you mean rollout.group_size?"),
        ("rolout:\n  group_size: 4\n", "rolout.group_size (yaml:c.yaml:2); did you mean rollout.group_size?"),
        ("rolout: {}\n", "unknown setting rolout (yaml:c.yaml:1); did you mean rollout?"),
        ("rolout: 4\n", "unknown setting rolout (yaml:c.yaml:1); did you mean rollout?"),
        ("group_size: 4\n", "unknown setting group_size (yaml:c.yaml:1); did you mean rollout.group_size?"),
        ("run: 3\n", "run (yaml:c.yaml:1) is a section; set one of its settings, such as run.name"),
        ("score:\n  policy: 3\n", "score.policy (yaml:c.yaml:2) is a section; set one of its settings"),
        (
            "batch_size: 4\nrollout:\n  prompts_per_step: 4\n",
            "is set twice: batch_size (yaml:c.yaml:1) and rollout.prompts_per_step (yaml:c.yaml:3)",
        ),
        (
            "use_dynamic_bsz: true\nlog_prob_use_dynamic_bsz: false\n",
            "score.dynamic is set twice: use_dynamic_bsz (yaml:c.yaml:1) and log_prob_use_dynamic_bsz (yaml:c.yaml:2)",
        ),
        (
            "use_dynamic_bsz: true\nalgorithm: {dynamic_microbatch: true}\n",
            "algorithm.dynamic_microbatch is set twice: use_dynamic_bsz (yaml:c.yaml:1) and algorithm.dynamic_microbat",
        ),
        ("<<: {run: {steps: 3}}\n", "unknown setting <<"),
        (
            "actor_rollout_ref:\n  rollout:\n    n: 5\n",
            "actor_rollout_ref.rollout.n (yaml:c.yaml:3); verl's rollout.n is rollout.group_size here",
        ),
        (
            "critic:\n  optim:\n    lr: 1e-5\n",
            "critic.optim.lr (yaml:c.yaml:3); verl's critic.optim.lr is critic.learning_rate here",
        ),
        ("max_steps: 9\n", "unknown setting max_steps (yaml:c.yaml:1); TRL's max_steps is run.steps here"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(folder: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_text(folder, text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        # Names of other programs, also in a section of ours or without their section.
        ("num_generations", "TRL's num_generations is rollout.group_size here"),
        ("num-generations", "TRL's num_generations is rollout.group_size here"),
        ("algorithm.num_generations", "TRL's num_generations is rollout.group_size here"),
        ("actor_rollout_ref.rollout.n", "verl's rollout.n is rollout.group_size here"),
        ("actor_rollout_ref.rollout.temperature", "did you mean rollout.temperature?"),
        ("actor.optim.betas", "verl's actor.optim.betas is optimizer.beta1 and optimizer.beta2 here"),
        ("critic.lr", "verl's critic.optim.lr is critic.learning_rate here"),
        ("optimizer.lr", "verl's actor.optim.lr is optimizer.learning_rate here"),
        (
            "lr",
            "verl's actor.optim.lr is optimizer.learning_rate here and "
            "verl's critic.optim.lr is critic.learning_rate here",
        ),
        ("algorithm.clip_ratio", "verl's actor.clip_ratio is algorithm.clip_low and algorithm.clip_high here"),
        ("epsilon", "TRL's epsilon is algorithm.clip_low here"),
        ("report_to", "TRL's report_to is logging.wandb_project and logging.tensorboard here"),
        ("vllm_importance_sampling_mode", "TRL's vllm_importance_sampling_mode is algorithm.correction_level here"),
        ("vllm_mode", "TRL's vllm_* has no counterpart here: rollout.slots is continuous batching"),
        ("sync_ref_model", "TRL's sync_ref_model has no counterpart here: the reference is the starting model"),
        (
            "per_device_train_batch_size",
            "TRL's per_device_train_batch_size is rollout.prompts_per_step here: "
            "per_device_train_batch_size x devices x steps_per_generation / num_generations / hosts",
        ),
        (
            "num_train_epochs",
            "TRL's num_train_epochs is run.steps here: epochs x prompts of the data / prompts of a step",
        ),
        ("repetition_penalty", "TRL's repetition_penalty has no counterpart here"),
        # The same last part in another section, abbreviations and misspellings.
        ("top_p", "did you mean rollout.top_p?"),
        ("seed", "did you mean run.seed?"),
        ("epochs", "did you mean algorithm.epochs?"),
        ("lora.rank", "did you mean model.lora.rank?"),
        ("optim.weight_decay", "did you mean optimizer.weight_decay?"),
        ("training.group_size", "did you mean rollout.group_size?"),
        ("eval.steps", "did you mean eval.every_steps?"),
        ("checkpoint.keep_last", "did you mean checkpoint.keep?"),
        ("score.rows", "did you mean score.rows_per_device?"),
        ("run.sede", "did you mean run.seed?"),
        # Similar to the name of another thing: no guess.
        *((f"critic.{name}", "`grpo settings critic` lists the settings") for name in ("epsilon", "n", "rank")),
        *((f"run.{name}", "`grpo settings run` lists the settings") for name in ("epochs", "banana")),
        *((f"data.{name}", "`grpo settings data` lists the settings") for name in ("path", "train")),
        *((f"rollout.{name}", "`grpo settings rollout` lists the settings") for name in ("num_samples", "temp")),
        *((name, "`grpo settings` lists the settings") for name in ("log_level", "dataset", "batch", "foo.bar")),
    ],
)
def test_an_unknown_name_is_explained_or_not_guessed_at(name: str, suggestion: str) -> None:
    with pytest.raises(InputError) as caught:
        with_sets(f"{name}=1")
    start, _, end = str(caught.value).partition(f"unknown setting {name} (--set); ")
    assert (start, end.startswith(suggestion)) == ("", True), str(caught.value)


@pytest.mark.parametrize("text", ["run: {stepz: 1}\nmodel: {pth: x}\n", "run: {steps: a}\nmodel: {dtype: b}\n"])
def test_all_unknown_names_and_all_wrong_values_are_listed_at_once(folder: Path, text: str) -> None:
    with pytest.raises(InputError) as caught:
        load_text(folder, text)
    assert len(str(caught.value).splitlines()) == 2


def test_a_file_of_another_program_gives_a_short_error(folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_text(folder, "trainer: {" + ", ".join(f"option_{number}: 1" for number in range(40)) + "}")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("unknown setting trainer.option_0 (yaml:c.yaml:1)")
    assert (len(lines), lines[-1]) == (11, "and 30 more")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"STEPS": "abc"}, "run.steps: expected a valid integer, got 'abc' (from env:STEPS)"),
        ({"STEPS": ""}, "environment variable STEPS has no value"),
        ({"GRPO__RUN__STEPS": " "}, "environment variable GRPO__RUN__STEPS has no value"),
        ({"STEPS": "1", "GRPO__RUN__STEPS": "1"}, "run.steps is set twice"),
        (
            {"GRPO__ROLOUT__GROUP_SIZE": "1"},
            "(names are GRPO__SECTION__FIELD); did you mean GRPO__ROLLOUT__GROUP_SIZE?",
        ),
        ({"GRPO__GROUP_SIZE": "1"}, "did you mean GRPO__ROLLOUT__GROUP_SIZE?"),
        ({"GRPO__run__steps": "1"}, "did you mean GRPO__RUN__STEPS?"),
        ({"GRPO__RUN": "{steps: 3}"}, "GRPO__RUN (names are GRPO__SECTION__FIELD); did you mean GRPO__RUN__*?"),
        ({"GRPO__STEPS": "3"}, "unknown environment variable GRPO__STEPS"),
        (
            {"GRPO__NUM_GENERATIONS": "8"},
            "(names are GRPO__SECTION__FIELD); TRL's num_generations is GRPO__ROLLOUT__GROUP_SIZE here",
        ),
        ({"BATCH_SIZE": "[1"}, "environment variable BATCH_SIZE:1:3: not valid YAML"),
    ],
)
def test_a_bad_environment_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(None, [], environ)
    assert message in str(caught.value)


def test_a_setting_may_be_set_only_once_on_the_command_line() -> None:
    with pytest.raises(InputError, match=r"run\.steps is set twice: steps \(--set\) and run\.steps \(--set\)"):
        with_sets("steps=1", "run.steps=2")
