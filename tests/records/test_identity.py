"""Tests how differences between two computations are found and described."""

from pathlib import Path

from app.records.identity import first_difference, plugin_file_digests, prompts_digest
from tests.tiny import make_prompt


def test_missing_values_count_as_differences_and_long_values_are_cut() -> None:
    text = first_difference({"run.seed": 0}, {"run.seed": 0, "the critic": "x" * 500}) or ""
    assert text.startswith("the critic was None there, and is 'xxx") and text.endswith("xxx... now")
    assert len(text) < 120


def test_digests_of_prompts_depend_on_their_fields_and_order() -> None:
    prompts = [make_prompt("row-0", (1, 2)), make_prompt("row-1", (3,))]
    assert prompts_digest(prompts).startswith("2 prompts, ")
    assert prompts_digest(prompts) == prompts_digest([*prompts])
    for others in (prompts[::-1], [prompts[0], make_prompt("row-2", (3,))], [prompts[0], make_prompt("row-1", (4,))]):
        assert prompts_digest(prompts) != prompts_digest(others)


def test_plug_ins_are_compared_by_the_contents_of_their_files(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def brevity(completion): return 1.0\n")
    names = [f"{path}:brevity", None, "calculator", "judges:f"]
    (before,) = plugin_file_digests("reward.functions", names).items()
    path.write_text("def brevity(completion): return 2.0\n")
    (after,) = plugin_file_digests("reward.functions", names).items()
    assert before[0] == after[0] == f"reward.functions: the file of {path}:brevity"
    assert before[1] != after[1]
