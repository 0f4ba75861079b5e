import json

import datasets
import numpy as np
import pytest

from app.prompts.data_sources import load_held_out_data, load_training_data, make_prompt_order
from app.prompts.prompt_order import MixtureOrder
from app.records.sample import Prompt
from settings.errors import InputError
from settings.schema.data import DataSettings


def write_rows(path, count):
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": str(i)}) + "\n" for i in range(count)))
    return str(path)


def test_the_default_trains_on_arithmetic_and_holds_some_of_it_out():
    train = load_training_data(DataSettings(num_problems=500), seed=3)
    held_out = load_held_out_data(DataSettings(num_problems=500), num_prompts=64)
    assert (len(train.rows), len(held_out.rows)) == (500, 64)
    assert not {row.uid for row in train.rows} & {row.uid for row in held_out.rows}


def test_held_out_rows_are_always_the_same_and_spread_over_the_file(tmp_path):
    data = DataSettings(source="unread.jsonl", eval_source=write_rows(tmp_path / "test.jsonl", 100))
    chosen = load_held_out_data(data, num_prompts=4)
    assert [row.prompt for row in chosen.rows] == ["p0", "p25", "p50", "p75"]
    assert len(load_held_out_data(data, num_prompts=1000).rows) == 100


def test_a_file_is_not_evaluated_on_itself_unless_asked_for(tmp_path):
    path = write_rows(tmp_path / "train.jsonl", 3)
    with pytest.raises(InputError, match=r"data\.eval_source is not set"):
        load_held_out_data(DataSettings(source=path), num_prompts=2)
    assert len(load_held_out_data(DataSettings(source=path, eval_source=path), num_prompts=2).rows) == 2


def test_an_unknown_built_in_data_set_is_an_input_error():
    with pytest.raises(InputError, match="no 'builtin:algebra'; the only built-in data set is builtin:arithmetic"):
        load_training_data(DataSettings(source="builtin:algebra"), seed=0)


def test_a_mixture_tells_its_sources_apart(tmp_path):
    (tmp_path / "b").mkdir()
    first, second = write_rows(tmp_path / "train.jsonl", 3), write_rows(tmp_path / "b" / "train.jsonl", 2)
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "p", "answer": "1", "data_source": "openai/gsm8k"}\n')
    names = [first, second, str(own), "builtin:arithmetic"]
    data = DataSettings.model_validate({"source": [{"source": name} for name in names], "num_problems": 4})
    mixed = load_training_data(data, seed=0)
    assert [row.uid.split("/")[0] for row in mixed.rows] == [*"000", *"11", "2", *"3333"]
    assert len({row.uid for row in mixed.rows}) == 10
    of = [row.extra["data_source"] for row in mixed.rows]
    assert of == [*[first] * 3, *[second] * 2, "openai/gsm8k", *["builtin:arithmetic"] * 4]
    assert mixed.to_text().splitlines()[:2] == [
        f"{first}: 3 rows (prompt from prompt, answer from answer)",
        f"{second}: 2 rows (prompt from prompt, answer from answer)",
    ]
    alone = load_training_data(DataSettings(source=first), seed=0)
    assert "data_source" not in alone.rows[0].extra and alone.rows[0].uid == "train/0"
    with pytest.raises(InputError, match=rf"data\.eval_source is not set, and training .* {first}, {second}, "):
        load_held_out_data(data, num_prompts=2)
    held_out = load_held_out_data(data.model_copy(update={"eval_source": first}), num_prompts=2)
    assert [row.extra["data_source"] for row in held_out.rows] == [first] * 2


def test_each_source_of_a_mixture_has_its_split():
    parts = [{"source": "builtin:arithmetic", "split": split} for split in ("train", "test")]
    mixed = load_training_data(DataSettings.model_validate({"source": parts, "num_problems": 20}), seed=0)
    assert len({str(row.prompt) for row in mixed.rows}) == 40


def test_held_out_data_of_a_training_source_has_its_revision(monkeypatch):
    rows, commits = [{"question": "1 + 1?", "answer": "2"}], []
    monkeypatch.setattr(
        "datasets.load_dataset",
        lambda *args, revision, split: commits.append((revision, split)) or datasets.Dataset.from_list(rows),
    )
    for sources in ({"source": "hf:a/b@abc"}, {"source": "a.jsonl", "eval_source": "hf:a/c:main"}):
        load_held_out_data(DataSettings.model_validate(sources), num_prompts=1)
    assert commits == [("abc", "test"), (None, "test")]


def test_the_prompts_of_a_mixture_are_in_the_order_of_their_sources_and_weights():
    data = DataSettings.model_validate({"source": ["a.jsonl", {"source": "b.jsonl", "weight": 3}]})
    prompts = [Prompt(f"{i % 2}/x/{i}", np.zeros(1, np.int32), "p", None) for i in range(10)]
    order = make_prompt_order(data, prompts, seed=1)
    assert isinstance(order, MixtureOrder)
    assert sum(index % 2 for index in order.row_indices(0, 8)) == 6
