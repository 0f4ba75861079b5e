"""Tests training on given completions, alone and before GRPO."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.records.jsonl import read_jsonl
from app.training.inputs import read_training_inputs
from app.training.rollout_source import GivenCompletions
from settings import load
from tests.model.reference import import_reference, load_reference
from tests.program import (
    UNJUDGED,
    assert_same_run,
    assert_same_state,
    copy_until,
    here,
    metrics_of,
    reproducible,
    run_of,
    saved_state,
    settings,
    succeeded,
    train_here,
)
from tests.run_fixtures import NO_REPORT, TINY, made_once, write_config
from tests.tiny_directory import write_model, write_tokenizer
from tests.training.test_bad_input import refused
from tests.two_hosts import run_on_two_hosts

SFT = """\
run: {{dir: {runs}, name: tiny, steps: 4}}
model: {{path: {model}}}
data: {{max_prompt_length: 16, num_problems: 40}}
rollout: {{prompts_per_step: 8, max_new_tokens: 4}}
algorithm: {{name: sft, mini_batch_prompts: 4, max_tokens_per_device: 20}}
optimizer: {{learning_rate: 1e-2}}
checkpoint: {{every_steps: 1, keep: 9}}
eval: {{every_steps: 2, num_prompts: 20}}
"""
TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | replace(' ', '') }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that writes an open assistant turn like the beginning of a complete one."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        write_tokenizer(write_model(folder / "turns"), chat_template=TURNS)

    return made_once(tmp_path_factory, "turns", make) / "turns"


@pytest.fixture
def sft_config(tmp_path: Path, model: Path) -> Path:
    return write_config(tmp_path, SFT + NO_REPORT, model)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Returns the directory of a run of four steps; tests must not change it."""
    folder = tmp_path_factory.mktemp("trained")
    succeeded(train_here(write_config(folder, SFT, model)))
    return folder / "runs" / "tiny"


def test_an_sft_run_trains_and_logs_only_applicable_metrics(trained: Path) -> None:
    start, *steps = metrics_of(trained)
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    assert [line["step"] for line in steps if "eval/accuracy" in line] == [2, 4] and "eval/accuracy" in start
    measured = {name.partition("/")[0] for name in steps[0] if not name.startswith(("time/", "perf/"))}
    assert measured == {"step", "loss", "policy", "data", "batching", "global_seqlen"}
    policy = {name.partition("/")[2] for name in steps[0] if name.startswith("policy/")}
    of_optimizer = {"grad_norm", "learning_rate", "nonfinite_updates", "nonfinite_in_a_row"}
    assert policy == {"entropy", "kl", *of_optimizer} and steps[0]["policy/kl"] is None
    assert steps[-1]["data/epoch"] == 32 / 40 and steps[0]["data/num_tokens"] > 8 * 4
    assert steps[0]["perf/flops"] > 0 and steps[0]["perf/tokens_per_s"] > 0
    assert not (trained / "rollouts").exists() and len([*(trained / "eval").iterdir()]) == 3
    assert (trained / "report.html").is_file()
    assert {path.stem for path in (trained / "plots").iterdir()} >= {"accuracy", "entropy", "times"}


def test_sft_loss_of_a_step_equals_the_cross_entropy_of_transformers(model, sft_config) -> None:
    """The data mixes text and conversations; the first of two optimizer steps is compared."""
    torch, _ = import_reference()
    chat = [("user", "1+1?"), ("assistant", "2"), ("user", "3?"), ("assistant", "4#"), ("user", "5")]
    rows: list[dict[str, Any]] = [{"messages": [{"role": role, "content": text} for role, text in chat]}]
    rows += [{"messages": [{"role": "user", "content": f"{i}+2?"}, {"role": "assistant", "content": f"{i + 2}"}]}
             for i in range(15)]  # fmt: skip
    path = write(sft_config.parent / "rows.jsonl", rows)
    sizes = ("rollout.max_new_tokens=9", "algorithm.max_tokens_per_device=25")
    changes = (f"data.source={path}", *sizes, "run.steps=1", "optimizer.learning_rate=1e-30")
    succeeded(train_here(sft_config, *changes, *UNJUDGED))
    chosen = load(str(sft_config), [*changes, *UNJUDGED], {}).settings
    inputs = read_training_inputs(chosen)
    assert "16 kept, 0 dropped" in inputs.data_report and "tokens to learn" in inputs.data_report
    taken = GivenCompletions(chosen, inputs.given).take({}, step=1, position=0, number=0)
    assert len({sample.group_id for sample in taken}) == 8
    network, losses, counts = load_reference(model), [0.0, 0.0], [0, 0]
    for number, sample in enumerate(taken):
        ids = np.concatenate([sample.prompt.token_ids, sample.completion_ids]).astype(np.int64)
        labels = np.where(np.arange(len(ids)) < len(sample.prompt.token_ids), -100, ids)
        labels[len(sample.prompt.token_ids) :][~sample.mask] = -100
        with torch.no_grad():
            loss = network(torch.from_numpy(ids)[None], labels=torch.from_numpy(labels)[None]).loss.item()
        losses[number % 2] += loss * sample.mask.sum()
        counts[number % 2] += sample.mask.sum()
    expected = np.mean([loss / count for loss, count in zip(losses, counts, strict=True)])
    assert metrics_of(run_of(sft_config))[-1]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_stopped_sft_run_resumes_bit_for_bit(trained: Path, sft_config: Path) -> None:
    copy_until(trained, run_of(sft_config), step=2)
    succeeded(train_here(sft_config, resume="must"))
    assert_same_run(run_of(sft_config), trained, step=4)


def test_sampling_settings_have_no_effect_in_sft_and_are_reported(trained: Path, sft_config: Path) -> None:
    unused = (
        "rollout.temperature=0.5",
        "algorithm.beta=0.1",
        "algorithm.filter=zero_variance",
    )
    result = succeeded(train_here(sft_config, *unused, "algorithm.gamma=0.9"))
    assert_same_state(run_of(sft_config), trained, step=4)
    assert reproducible(metrics_of(run_of(sft_config))) == reproducible(metrics_of(trained))
    names = ("algorithm.beta", "algorithm.filter", "rollout.temperature")
    start = "no effect without sampled completions (another algorithm.name than sft): "
    line = next(one for one in result.stderr.splitlines() if one.startswith(start))
    assert all(f"{name} = " in line for name in names)
    assert "no effect without algorithm.estimator gae or rein" in result.stderr


def test_grpo_starts_from_the_policy_of_an_sft_run(trained: Path, tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, TINY + NO_REPORT, model)
    succeeded(here("train", "--config", config, "--checkpoint", trained, *settings("run.steps=1", "run.name=tiny")))
    first, last = metrics_of(run_of(config))[0], metrics_of(trained)[-1]
    assert [first[f"eval/{name}"] for name in ("accuracy", "mean_length")] == [
        last[f"eval/{name}"] for name in ("accuracy", "mean_length")
    ]
    # The settings are those of the SFT run, except that another algorithm makes the run sample again.
    options = settings(
        f"run.dir={tmp_path / 'again'}", "algorithm.name=grpo", "run.steps=1", "rollout.prompts_per_step=4"
    )
    succeeded(here("train", "--checkpoint", trained, *options, *settings(*UNJUDGED)))
    (line,) = metrics_of(tmp_path / "again" / "tiny-warm-start")
    assert "reward/mean" in line


def test_dry_run_inspect_mesh_and_doctor_support_sft(sft_config: Path) -> None:
    dry = succeeded(here("train", "--config", sft_config, "--dry-run", "--compile", "--json"))
    report = json.loads(dry.stdout)
    assert report["rollout"] is None and report["evaluation"]["num_rows"] and report["samples_per_step"] == 8
    assert not report["score"] and report["epochs_of_data"] == 32 / 40 and "tokens to learn" in report["data"]
    assert {one["phase"] for one in report["programs"]} == {"evaluation", "update"}
    unjudged = succeeded(here("inspect-mesh", "--config", sft_config, *settings(*UNJUDGED)))
    assert "nothing is generated" in unjudged.stdout
    assert "rows with a cache" not in unjudged.stdout
    assert "slots with a cache" in succeeded(here("inspect-mesh", "--config", sft_config)).stdout
    doctor = here("doctor", "--config", sft_config)
    assert doctor.exit_code == 0, doctor.stdout
    assert "tokens to learn" in doctor.stdout and "arithmetic: 1 for the reference answer" in doctor.stdout
    alone = here("doctor", "--config", sft_config, *settings(*UNJUDGED))
    assert alone.exit_code == 0 and "completions are given, and there is no evaluation" in alone.stdout


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sft_refuses_unusable_completions_and_settings(sft_config: Path, tiny_model: Path, trained: Path) -> None:
    rows = write(sft_config.parent / "rows.jsonl", [{"prompt": "1", "completion": "2"}, {"prompt": "1", "answer": "2"}])
    data = (f"data.source={rows}", *UNJUDGED)
    assert "rows.jsonl:2: completion: expected a completion as text or chat, got None" in refused(sft_config, *data)
    turns = [{"role": role, "content": "2"} for role in ("assistant", "user", "assistant")]
    rows.write_text("\n" + json.dumps({"prompt": "1", "completion": turns}) + "\n")
    chat = refused(sft_config, *data, "data.chat_template=none", "data.system_prompt=null")
    assert "rows.jsonl:2: the completion is a chat" in chat
    write(rows, [{"prompt": "1", "completion": "2"}])
    column = refused(sft_config, *data, "data.answer_column=messages")
    assert "data.answer_column: " in column and "has no column messages" in column
    long = refused(sft_config, "rollout.max_new_tokens=1")
    assert "rollout.max_new_tokens = 1 is too short for 40 of 40 completions: the shortest has 2 tokens" in long
    assert "set data.overlong_prompts: drop" in refused(
        sft_config, "rollout.max_new_tokens=2", "data.overlong_prompts=error"
    )
    unmarked = refused(sft_config, f"model.path={tiny_model}")
    assert "the assistant's tokens cannot be identified" in unmarked
    replayed = refused(sft_config, "run.name=other", options=("--from-rollouts", trained))
    assert "--from-rollouts: algorithm.name: sft trains on the completions of data.source" in replayed
    for name, value in (("rollout.group_size", 4), ("reward.model", "judge"), ("algorithm.estimator", "gae")):
        message = refused(sft_config, f"{name}={value}", "algorithm.name=sft")
        assert f"{name} = " in message and "is for sampled completions, and algorithm.name = 'sft'" in message


def test_choosing_sft_later_overrides_settings_for_sampling() -> None:
    later = load("quickstart", ["algorithm.name=sft"], {})
    assert later.settings.rollout.group_size == 1 and later.provenance["rollout.group_size"] == "derived"
    assert later.settings.algorithm.estimator is None and not later.settings.scored_roles
    ppo = load("quickstart_ppo", ["algorithm.name=sft"], {}).settings
    assert not ppo.has_critic
    # Commands that sample from the policy of an SFT run may set these options.
    assert load("quickstart_sft", ["rollout.group_size=8"], {}).settings.rollout.group_size == 8
    assert load("quickstart_sft", [], {}).settings.rollout.group_size == 1


def test_plug_ins_grade_only_the_evaluations_of_an_sft_run(sft_config: Path) -> None:
    code = "def judge(completion, solution):\n    return 1.0 * (solution in completion)\n"
    (sft_config.parent / "judge.py").write_text(code)
    judge = f"reward.functions=[{sft_config.parent / 'judge.py'}:judge]"
    held_out = write(sft_config.parent / "held_out.jsonl", [{"prompt": f"{i}+1", "solution": "1"} for i in range(4)])
    succeeded(train_here(sft_config, judge, f"data.eval_source={held_out}", "run.steps=1", "data.answer_column=null"))
    assert metrics_of(run_of(sft_config))[-1]["eval/accuracy"] is not None
    unjudged = succeeded(train_here(sft_config, judge, *UNJUDGED, "run.steps=1", "run.name=unjudged"))
    assert "judge.py" not in unjudged.stderr


@pytest.mark.two_hosts
def test_two_hosts_train_sft_like_one_host(trained: Path, model: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, SFT + NO_REPORT, model)
    halves = settings("rollout.prompts_per_step=4", "algorithm.mini_batch_prompts=2")
    first, second = run_on_two_hosts("train", "--config", config, *halves)
    assert (first.exit_code, second.exit_code) == (0, 0), (first, second)
    names = ("loss", "policy/entropy", "policy/grad_norm", "data/num_tokens", "eval/accuracy")
    for ours, expected in zip(metrics_of(run_of(config)), metrics_of(trained), strict=True):
        for name in set(names) & {*expected}:
            assert ours[name] == pytest.approx(expected[name], rel=1e-4), (name, expected["step"])
    ours, expected = saved_state(run_of(config), 4), saved_state(trained, 4)
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-3, atol=1e-5, err_msg=name)
    assert [record["completion"] for _, record in read_jsonl(run_of(config) / "eval" / "step_000004.jsonl")]
