"""Tests `import grpo`: its functions do what the commands do, with Python functions, rows and callbacks."""

import ast
import asyncio
import contextlib
import inspect
import os
import re
import signal
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest

import grpo
from app.commands.command_support import command_output
from app.records.jsonl import write_jsonl
from settings import InputError
from settings.loading.sources import build_layer, set_entries, set_options
from tests import program
from tests.run_fixtures import NO_REPORT, TINY, write_config

ROWS = [{"question": f"{a} + {b} = ?", "answer": str(a + b), "level": a % 3} for a in range(2, 8) for b in range(4)]
HELD_OUT = [{"question": f"9 + {a} = ?", "answer": str(9 + a)} for a in range(20)]
LENGTH = "def length(completion, level=0): return len(completion) + level\n"
"""A reward function, as a file and as a function of this process."""


def length(completion: str, level: int = 0) -> float:
    return len(completion) + level


pytestmark = pytest.mark.usefixtures("in_folder")


def train(config: Path, *, overrides: dict[str, Any] | None = None, **arguments: Any) -> Any:
    given = {"data": ROWS, "eval_data": HELD_OUT, "rewards": ["arithmetic", {"function": length, "weight": 0.5}]}
    return grpo.train(config, overrides, **{**given, **arguments})


def sample(completion: str, index: int, **columns: Any) -> dict[str, Any]:
    ids = {"prompt_token_ids": [1], "completion_token_ids": [2], "behavior_logprobs": [-0.5]}
    place = {"uid": f"q/s{index}", "group_id": 0, "sample_index": index, "policy_version": 0, "finish_reason": "stop"}
    return {**place, **ids, "prompt": "1 + 1 = ?", "completion": completion, "answer": "2", "columns": columns}


def score_rewards(*rewards: Any, **overrides: Any) -> Any:
    """Returns the rewards of two samples without a device; one reward needs no list."""
    samples = [sample(text, i, level=i) for i, text in enumerate(("2", "three"))]
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return grpo.score(iter(samples), overrides=named, role="reward", rewards=rewards if rewards[1:] else rewards[0])


def test_importing_grpo_loads_no_other_package_and_leaves_the_path_unchanged() -> None:
    source = (
        "import sys; path, modules = list(sys.path), set(sys.modules)\n"
        "import grpo\n"
        "loaded = {name.partition('.')[0] for name in set(sys.modules) - modules}\n"
        "assert not loaded & {'app', 'settings', 'cli', 'jax', 'numpy', 'pydantic', 'typer'}, loaded\n"
        "assert sys.path == path\n"
        "grpo.InputError\n"
        "assert 'app' in sys.modules and 'jax' not in sys.modules and sys.path == path\n"
    )
    done = program.run_python("-c", source)
    assert done.returncode == 0, done.stderr


def test_documented_calls_match_the_signatures_of_the_functions() -> None:
    functions = {f"grpo.{one.__name__}": one for one in (grpo.train, grpo.evaluate, grpo.rollout, grpo.score)}
    blocks, names = [], set()
    for path in (program.REPOSITORY / "README.md", *(program.REPOSITORY / "sops").rglob("*.md")):
        blocks += re.findall(r"^```python\n(.*?)^```", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for function in functions.values():
        blocks += re.findall(r"\n\n((?: {4}.*\n+)+)Args:", inspect.cleandoc(function.__doc__ or ""))
    for call in (node for block in blocks for node in ast.walk(ast.parse(textwrap.dedent(block)))):
        if isinstance(call, ast.Call) and (name := ast.unparse(call.func)).startswith("grpo."):
            given: Any = {keyword.arg: None for keyword in call.keywords}
            assert "unknown" not in inspect.signature(functions[name]).bind(*call.args, **given).arguments
            names.add(name)
    assert names == functions.keys()


def test_errors_about_foreign_names_and_arguments_suggest_ours() -> None:
    assert issubclass(grpo.InputError, ValueError)
    with pytest.raises(
        AttributeError, match=r"no attribute 'Trainer'; .* train, evaluate, .* sops/migrate/from_trl\.md"
    ):
        _ = grpo.Trainer
    assert (program.REPOSITORY / "sops/migrate/from_trl.md").is_file()
    with pytest.raises(AttributeError, match=r"no attribute '__wrapped__'$"):
        _ = grpo.__wrapped__
    with pytest.raises(InputError, match=r"^model, reward_funcs: .* overrides=\{.*`rewards`, rows as `data`") as raised:
        grpo.train(model="m", reward_funcs=[length])
    assert str(raised.value).endswith("; TRL's model is model.path here; TRL's reward_funcs is reward.functions here")


def test_training_on_rows_and_functions_equals_training_on_files(config, tmp_path, tiny_model, capsys):
    seen: list[Any] = []
    run = train(config, on_step=seen.append, overrides={"run": {"steps": 2}})
    assert run.path == program.run_of(config) and run.is_complete
    assert run.exit_code == 0 and run.best is not None
    assert (run.path / "checkpoints" / str(run.best.step)).is_dir()
    assert list(run.metrics) == program.metrics_of(run.path) and seen == program.metrics_of(run.path)[1:]
    assert capsys.readouterr().out == ""
    # The command gives the same run.
    (tmp_path / "other").mkdir()
    other = write_config(tmp_path / "other", TINY + NO_REPORT, tiny_model)
    write_jsonl("train.jsonl", ROWS)
    write_jsonl("eval.jsonl", HELD_OUT)
    Path("plug.py").write_text(LENGTH)
    functions = "reward.functions=[arithmetic, {function: plug.py:length, weight: 0.5}]"
    files = ("data.source=train.jsonl", "data.eval_source=eval.jsonl")
    program.succeeded(program.train_here(other, functions, *files, "run.steps=2"))
    assert program.reproducible(program.metrics_of(program.run_of(other))) == program.reproducible(run.metrics)


def test_a_run_ended_by_on_step_or_ctrl_c_is_saved_and_can_continue(config: Path) -> None:
    once = {"checkpoint.every_steps": 100, "checkpoint.best_metric": None, "eval.every_steps": 0}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(InputError, match=r"^resume='must': .* has no checkpoint; use resume='auto' to start there$"):
        train(config, overrides=once, resume="must")
    run = train(config, on_step=lambda metrics: metrics["step"] == 1, overrides=once)
    assert not run.is_complete and [line["step"] for line in run.metrics] == [1]
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["1"]
    saved = (run.path / "settings.yaml").read_text()
    assert "{name: length, function: 'callable:length', weight: 0.5}]  # set" in saved
    assert f"source: {run.path / 'data'}" in saved
    with pytest.raises(InputError, match=r"already holds a run; .* or continue it with resume='auto'$"):
        train(config, overrides=once)
    with pytest.raises(InputError, match=r"reward.functions: callable:length is a Python function passed to"):
        grpo.train(run.path / "settings.yaml", resume="must")
    with pytest.raises(InputError, match="data"):
        train(config, data=ROWS[1:], overrides=once, resume="must")
    changed = {**once, "optimizer.weight_decay": 0.1, "rollout.top_k": 3}
    names = r"\['rollout\.top_k', 'optimizer\.weight_decay'\]"
    with pytest.raises(InputError, match=rf"(?s)^resume: these settings differ.*with allow_changed={names}$"):
        train(config, overrides=changed, resume="auto")
    with pytest.raises(InputError, match=r"^allow_changed: there is no setting or section rollout\.topk; did you mean"):
        train(config, overrides=changed, resume="auto", allow_changed=["rollout.topk"])
    with pytest.raises(InputError, match=r"^checkpoint: role='reference' uses only the weights of model\.path"):
        grpo.score([sample("2", 0)], role="reference", checkpoint=run.path)
    assert (run.path / "settings.yaml").read_text() == saved
    with pytest.raises(KeyboardInterrupt, match="continue it with resume='auto'"):
        train(config, on_step=lambda _: os.kill(os.getpid(), signal.SIGINT), overrides=once, resume="must")
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    last = program.metrics_of(run.path)[-1]["step"]
    assert last < 4 and (run.path / "checkpoints" / str(last)).is_dir()
    with pytest.raises(ZeroDivisionError):
        train(config, on_step=lambda _: 1 / 0, overrides=once, resume="auto")
    assert [line["step"] for line in program.metrics_of(run.path)] == [*range(1, last + 2)]


def test_train_needs_the_main_thread_and_the_devices_that_jax_has() -> None:
    with ThreadPoolExecutor(1) as executor, pytest.raises(InputError, match="only the main thread can do"):
        executor.submit(grpo.train).result()
    assert len(jax.devices()) == 8
    with pytest.raises(InputError, match=r"mesh\.cpu_devices: got 3, but JAX has already started in this process"):
        grpo.train(overrides={"mesh.cpu_devices": 3})


def test_python_evaluate_rollout_and_score_give_the_results_of_the_commands(finished: Path, tmp_path: Path) -> None:
    checkpoint, out = finished / "checkpoints" / "2", tmp_path / "samples.jsonl"
    evaluation = grpo.evaluate(checkpoint=checkpoint)
    assert evaluation is not None and evaluation.metadata.step == 2
    logged = next(line for line in program.metrics_of(finished) if line["step"] == 2)
    assert {name: logged[name] for name in evaluation.metrics} == {n: e.value for n, e in evaluation.metrics.items()}
    program.succeeded(program.here("rollout", "--checkpoint", checkpoint, "--limit", "3", "--out", out))
    samples = grpo.rollout(checkpoint=str(checkpoint), limit=3)
    assert samples is not None and samples.summary["prompts"] == 3

    assert [{**record, "elapsed_s": 0} for record in samples.records] == program.without_clock(out)
    scored = grpo.score(out, checkpoint=checkpoint, out=tmp_path / "scored.jsonl")
    assert scored is not None and list(scored.records) == program.records_of(tmp_path / "scored.jsonl")
    assert scored.summary["max |logprob - behavior|"] < 1e-4


def test_rows_from_python_can_be_evaluated_and_sampled(finished: Path) -> None:
    judged = grpo.evaluate(checkpoint=finished, data=HELD_OUT, rewards=[lambda completion, answer: answer == "18"])
    assert judged is not None and judged.num_prompts == 20
    assert judged.metrics["eval/accuracy"].value == pytest.approx(0.05)
    rows = [{**row, "tests": "x" * 300} for row in ROWS]
    samples = grpo.rollout(checkpoint=finished, data=rows, limit=2)
    assert samples is not None
    assert [one["prompt"] for one in samples.records[::4]] == [row["question"] for row in ROWS[:2]]
    assert samples.records[0]["uid"] == "train/0/s0"
    assert all(one["columns"] == {"level": 2, "tests": "x" * 300} and "row_of" not in one for one in samples.records)


def test_reward_functions_can_be_called_inside_a_running_event_loop() -> None:
    async def asynchronous(completion: str) -> float:
        await asyncio.sleep(0)
        return len(completion)

    async def cell() -> Any:
        return score_rewards(asynchronous, {"function": length}, "arithmetic")

    rewards = [one["rewards"] for one in asyncio.run(cell()).records]
    assert rewards == [{"asynchronous": n, "length": n + i, "arithmetic": 1 - i} for i, n in enumerate((1, 5))]


def test_errors_of_the_python_api_equal_the_errors_of_commands() -> None:
    answer = program.here("train", *program.settings("run.steps=abc", "rollout.group_size=0"))
    with pytest.raises(InputError) as raised:
        grpo.train(overrides={"run.steps": "abc", "rollout": {"group_size": 0}})
    assert "from --set" in answer.stderr
    assert answer.stderr.replace("from --set", "from overrides") == f"error: {raised.value}\n"
    with pytest.raises(InputError, match=r"unknown setting run\.step .*did you mean run\.steps"):
        grpo.evaluate(overrides={"run.step": 3})
    with pytest.raises(InputError, match=r"config: there is no file .*/models--a--resume/ray --head\.yaml"):
        grpo.rollout(Path("models--a--resume/ray --head.yaml"))


def test_output_to_a_closed_pipe_is_dropped() -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as stderr, contextlib.redirect_stderr(stderr):
        with command_output():
            os.close(reading)
            print("step 2", file=sys.stderr, flush=True)
        assert sys.stderr is stderr


def test_python_functions_do_not_replace_existing_files(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text("precious")
    for call in (grpo.rollout, lambda out: grpo.score([sample("2", 0)], role="reward", out=out)):
        with pytest.raises(InputError, match=r"^out: old\.jsonl exists already; delete it or give another name$"):
            call(out="old.jsonl")
    assert (tmp_path / "old.jsonl").read_text() == "precious"


def test_overrides_from_python_keep_their_types_and_values() -> None:
    values: dict[str, Any] = {
        **{"optimizer.learning_rate": 1e-6, "run.steps": 3, "run.name": "no", "data.shuffle": False},
        **{"data.split": None, "data.system_prompt": "a: #b\nü 1e3", "data.difficulty": [1, 2]},
        **{"model.path": "12e4567", "reward.functions": ["gsm8k", {"function": "a.py:f", "weight": 0.5}]},
    }
    nested = {"run.dir": Path("a b"), "rollout": {"workers": {"fast": {"slots": 4}}, "top_k": 2}}
    layer = build_layer(set_entries(set_options({**values, **nested})))
    flat = {"run.dir": "a b", "rollout.workers.fast.slots": 4, "rollout.top_k": 2}
    assert {name: leaf.value for name, leaf in layer.items()} == {**values, **flat}
    assert {leaf.origin for leaf in layer.values()} == {"set"}
    with pytest.raises(InputError, match=r"rollout\.top_p: expected None, a bool, .* got <object .* of type object"):
        list(set_options({"rollout": {"top_p": object()}}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"run.steps": 2}}, "expected a preset or a YAML file, got .*; settings belong in `overrides`"),
        ({"resume": True}, "resume: expected auto, never or must, got True"),
        ({"data": "rows.jsonl"}, "train data: expected rows, got 'rows.jsonl'; name a file in data.source"),
        ({"data": ["1 + 1 = ?"]}, r"train data, row 0: expected a dict of JSON values, got '1 \+ 1 = \?'"),
        ({"data": [ROWS[0], {"question": "?", "weight": object()}]}, "data, row 1: expected a dict of JSON values"),
        ({"data": ROWS}, r"^eval_data: the run evaluates every \d+ steps, but all rows of `data` are used for"),
        ({"data": [], "eval_data": HELD_OUT}, "contains no rows"),
        ({"data": [{"text": "1"}], "eval_data": HELD_OUT}, "has no column prompt, question"),
    ],
)
def test_train_refuses_unusable_arguments_and_rows(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        grpo.train(**arguments)
    assert not list(Path().rglob("settings.yaml"))
