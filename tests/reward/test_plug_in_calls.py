from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from app.reward.plugin import StepInfo
from app.reward.plugin_signature import MAX_CHARACTERS, DataColumns
from app.reward.reward_functions import RewardFunctions
from settings.schema.reward import PluginSettings, RewardSettings
from tests.reward.processes import WORKERS
from tests.reward.samples import kinds_of, make_group, make_prompt, make_sample, score, values_of, write_plug_in

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = WORKERS


@pytest.mark.parametrize(
    ("source", "values"),
    [
        ("def f(completion): return len(completion)", [1.0, 2.0, 3.0]),
        ("def f(completion, answer): return completion == answer", [0.0, 1.0, 0.0]),
        ("async def f(completion): return len(completion)", [1.0, 2.0, 3.0]),
        ("def f(solution_str, ground_truth): return {'score': len(solution_str), 'acc': 1}", [1.0, 2.0, 3.0]),
        ("def f(completions, **kwargs): return [len(c) + len(kwargs['answer']) for c in completions]", [4.0, 5.0, 6.0]),
        ("def f(prompts, completion_ids): return (sum(ids) for ids in completion_ids)", [0.0, 1.0, 3.0]),
        ("async def f(completions):\n    import asyncio\n    await asyncio.sleep(0)\n    return [1] * 3", [1.0] * 3),
        ("import numpy\ndef f(completions): return numpy.float32([0.5, 1.5, 2.5])", [0.5, 1.5, 2.5]),
        ("from fractions import Fraction\ndef f(completion): return Fraction(len(completion), 2)", [0.5, 1.0, 1.5]),
        ("import functools\nf = functools.partial(lambda completion, scale: scale, scale=2)", [2.0, 2.0, 2.0]),
        ("class Judge:\n    def __call__(self, completion): return 1\nf = Judge()", [1.0, 1.0, 1.0]),
        ("def f(completions, trainer_state):\n    s = trainer_state\n"
         "    return [s.global_step + s.max_steps for _ in completions]", [13.0] * 3),
        ("def f(completion):\n    print('{\"outcomes\": []}')\n    return 1", [1.0, 1.0, 1.0]),
        ("import os\ndef f(completion):\n    os.fork()\n    return 1", [1.0, 1.0, 1.0]),
        ("def f(completion):\n    try: return input()\n    except EOFError: return 7", [7.0] * 3),
    ],
)  # fmt: skip
def test_a_plug_in_gives_its_values(tmp_path: Path, source: str, values: list[float]) -> None:
    samples = [make_sample(text, make_prompt("ab")) for text in ("a", "ab", "abc")]
    scored = score([f"{write_plug_in(tmp_path, source)}:f"], samples)
    assert (values_of(scored), scored.notices) == (values, ())


def test_the_functions_of_the_readme_work_as_written(tmp_path: Path) -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", readme, flags=re.DOTALL | re.MULTILINE)
    path = write_plug_in(tmp_path, block)
    sample = make_sample("so 18", make_prompt("18"))
    (scored,) = score([f"{path}:{name}" for name in ("brevity", "score", "overlap")], [sample]).samples
    assert scored.rewards == {"brevity": 0.4, "score": 1.0, "overlap": 1.0}


def test_a_module_of_the_working_directory_may_import_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards").mkdir()
    write_plug_in(tmp_path, "from neighbour import SCALE\nclass Style:\n    def f(completion): return SCALE", "my.py")
    write_plug_in(tmp_path / "my_rewards", "from my import Style\ndef g(completion): return 3", "deep.py")
    write_plug_in(tmp_path, "SCALE = 2", "neighbour.py")
    monkeypatch.chdir(tmp_path)
    functions = ["my:Style.f", "my_rewards.deep:g", {"name": "again", "function": "my.py:Style.f", "weight": 10}]
    assert values_of(score(functions, make_group("a"))) == [25.0]


def test_a_plug_in_may_abstain_in_batch_style_alone(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "def f(completions): return [1, None]\ndef g(completion): return None")
    scored = score([f"{path}:f"], make_group("a", "b"))
    assert [s.rewards for s in scored.samples] == [{"f": 1.0}, {}]
    assert scored.num_abstained == 1
    scored = score([f"{path}:g"], make_group("a"))
    assert kinds_of(scored) == ["value"] and "returned None, expected a number" in scored.notices[0]


def test_further_numbers_come_from_dicts_and_from_log_metric(tmp_path: Path) -> None:
    path = write_plug_in(
        tmp_path,
        "def verl(solution_str):\n"
        "    return {'score': 1, 'acc': solution_str == 'b', 'why': 'so', 'bad name!': 1, 'nan': float('nan')}\n"
        "def trl(completions, log_metric):\n    n = len(completions)\n    log_metric('seen', n)\n    return [0] * n\n",
    )
    scored = score([f"{path}:verl", f"{path}:trl"], [*make_group("a", "b"), *make_group("b", group=1)], batch_size=2)
    assert scored.function_counts["verl"].extras == {"acc": (2.0, 3)}
    # Two calls, of two samples and of one: each sample counts the number of its call.
    assert scored.function_counts["trl"].extras == {"seen": (5.0, 3)}


def test_batches_hold_whole_groups(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "def f(completions): return [len(completions)] * len(completions)")
    samples = [sample for group in range(4) for sample in make_group("a", "b", "c", group=group)]
    assert values_of(score([f"{path}:f"], samples, batch_size=7)) == [6.0] * 12
    assert values_of(score([f"{path}:f"], samples, batch_size=1)) == [3.0] * 12
    assert values_of(score([f"{path}:f"], samples[::-1] + samples[:1], batch_size=9)) == [9.0] * 9 + [4.0] * 4


def test_results_come_in_the_order_of_the_samples_whoever_is_done_first(tmp_path: Path) -> None:
    path = write_plug_in(
        tmp_path, "import time\ndef f(completion):\n    time.sleep(0.1 / len(completion))\n    return len(completion)"
    )
    samples = make_group(*("x" * length for length in range(1, 20)))
    assert values_of(score([f"{path}:f"], samples, workers=4)) == [float(n) for n in range(1, 20)]


def test_held_out_samples_are_given_what_their_own_data_have(tmp_path: Path) -> None:
    source = (
        "def f(solution_str, data_source, **kwargs):\n"
        "    return {'score': len(data_source), 'trained': 'level' in kwargs, 'asked': kwargs.get('topic') == 'sums'}"
    )
    training = [make_sample("a", make_prompt(level=1))]
    held_out = [make_sample("a", make_prompt(topic="sums"))]
    settings = RewardSettings.model_validate({"functions": [f"{write_plug_in(tmp_path, source)}:f"]})
    of_training = DataColumns.from_rows([s.prompt for s in training], source="train.jsonl")
    of_held_out = DataColumns.from_rows([s.prompt for s in held_out], source="test")
    with RewardFunctions(settings, PluginSettings(), of_training, of_held_out) as rewards:
        scored, judged = rewards.compute_rewards(training, StepInfo()), rewards.grade_held_out(held_out, StepInfo())
    assert (values_of(scored), scored.function_counts["f"].extras) == ([11.0], {"trained": (1.0, 1), "asked": (0.0, 1)})
    assert (values_of(judged), judged.function_counts["f"].extras) == ([4.0], {"trained": (0.0, 1), "asked": (1.0, 1)})


def test_a_held_out_sample_that_could_not_be_generated_is_wrong(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "def f(completion): return 1.0")
    settings = RewardSettings.model_validate({"functions": [f"{path}:f"]})
    samples = [make_sample("a"), replace(make_sample(""), finish_reason="dropped:non-finite logits")]
    columns = DataColumns.from_rows([s.prompt for s in samples], source="test")
    with RewardFunctions(settings, PluginSettings(), columns, columns) as rewards:
        judged = rewards.grade_held_out(samples, StepInfo())
    assert [s.rewards for s in judged.samples] == [{"f": 1.0}, {"f": 0.0}]
    assert [s.reward for s in judged.samples] == [1.0, None]


def test_a_completion_of_any_size_and_content_arrives(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "def f(completion): return len(completion)")
    texts = ["\x00\n\r\u2028\ud800\U0001f600", "x" * MAX_CHARACTERS, ""]
    scored = score([f"{path}:f"], make_group(*texts))
    assert values_of(scored) == [float(len(text)) for text in texts]
