import json

import pytest

from app.prompts.data_sources import load_held_out_data, load_training_data
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


def test_null_holds_out_all_there_is(tmp_path):
    data = DataSettings(source="unread.jsonl", eval_source=write_rows(tmp_path / "test.jsonl", 100))
    assert len(load_held_out_data(data, num_prompts=None).rows) == 100
    # Of what can be made on the spot, no more than there is to train on.
    assert len(load_held_out_data(DataSettings(num_problems=50), num_prompts=None).rows) == 50


def test_a_file_is_not_evaluated_on_itself_unless_asked_for(tmp_path):
    path = write_rows(tmp_path / "train.jsonl", 3)
    with pytest.raises(InputError, match=r"data\.eval_source is not set"):
        load_held_out_data(DataSettings(source=path), num_prompts=2)
    assert len(load_held_out_data(DataSettings(source=path, eval_source=path), num_prompts=2).rows) == 2


def test_an_unknown_built_in_data_set_is_an_input_error():
    with pytest.raises(InputError, match="no 'builtin:algebra'; the only built-in data set is builtin:arithmetic"):
        load_training_data(DataSettings(source="builtin:algebra"), seed=0)
