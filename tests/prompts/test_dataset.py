import json
from pathlib import Path

import pytest

from app.prompts.dataset import load_dataset
from settings.errors import InputError


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def write_parquet(path, records):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return str(path)


@pytest.mark.parametrize(("split", "size"), [("train", 7473), ("test", 1319)])
def test_gsm8k_files_work_as_they_are(gsm8k_dir, split, size):
    dataset = load_dataset(str(gsm8k_dir / f"{split}.jsonl"))
    assert len(dataset.rows) == size
    assert dataset.column_mapping == {"prompt": "question", "answer": "answer"}
    assert dataset.rows[17].uid == f"{split}/17"
    assert all(row.answer and "\n#### " in row.answer for row in dataset.rows)


@pytest.mark.parametrize("prompt_column", ["prompt", "question", "problem"])
@pytest.mark.parametrize("answer_column", ["answer", "ground_truth", "solution"])
def test_usual_column_names_are_found(tmp_path, prompt_column, answer_column):
    path = write_lines(tmp_path / "d.jsonl", {"id": 9, prompt_column: "1 + 1?", answer_column: 2})
    dataset = load_dataset(path)
    (row,) = dataset.rows
    assert (row.uid, row.prompt, row.answer, row.extra) == ("d/0", "1 + 1?", "2", {"id": 9})
    assert dataset.column_mapping == {"prompt": prompt_column, "answer": answer_column}


def test_chosen_columns_win_over_usual_names(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", {"prompt": "p", "text": "t", "answer": "a", "meta": {"key": 1.5}})
    dataset = load_dataset(path, prompt_column="text", answer_column="meta.key")
    assert (dataset.rows[0].prompt, dataset.rows[0].answer) == ("t", "1.5")
    assert dataset.to_text() == f"{path}: 1 rows (prompt from text, answer from meta.key)"


def test_rows_without_an_answer_are_counted(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", {"prompt": "p", "answer": "a"}, {"prompt": "q"}, {"prompt": "r"})
    assert load_dataset(path).to_text().endswith("3 rows (prompt from prompt, answer from answer, 2 without an answer)")


def test_a_row_without_its_answer_has_none(tmp_path):
    dataset = load_dataset(write_lines(tmp_path / "d.jsonl", {"prompt": "p", "answer": "1"}, {"prompt": "q"}))
    assert [row.answer for row in dataset.rows] == ["1", None]


def test_chat_messages_keep_role_and_content(tmp_path):
    messages = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "u"}]
    dataset = load_dataset(write_lines(tmp_path / "d.jsonl", {"messages": messages}))
    assert dataset.rows[0].prompt == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def test_verl_parquet_files_are_understood(tmp_path):
    record = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
        "raw": b"\xff",
    }
    dataset = load_dataset(write_parquet(tmp_path / "verl.parquet", [record]))
    (row,) = dataset.rows
    assert row.prompt == record["prompt"] and row.answer == "2"
    assert dataset.column_mapping == {"prompt": "prompt", "answer": "reward_model.ground_truth"}
    assert "raw" not in row.extra and row.extra["extra_info"] == {"index": 0}


def test_a_hub_data_set_is_read_through_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "sums"
    folder.mkdir()
    write_parquet(folder / "train.parquet", [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(3)])
    write_parquet(folder / "test.parquet", [{"question": "9 + 1?", "answer": "10"}])
    dataset = load_dataset(f"hf:{folder}", split="train")
    assert [row.uid for row in dataset.rows] == ["sums/train/0", "sums/train/1", "sums/train/2"]
    assert [row.answer for row in load_dataset(f"hf:{folder}", split="test").rows] == ["10"]
    with pytest.raises(InputError, match=r"split 'dev'.*cannot be loaded"):
        load_dataset(f"hf:{folder}", split="dev")


def test_an_absent_hub_data_set_is_one_plain_error(tmp_path):
    with pytest.raises(InputError, match=r"data.source: hf:.*absent.*cannot be loaded"):
        load_dataset(f"hf:{tmp_path}/absent/too/deep", split="train")


def test_the_fingerprint_follows_all_columns_and_order(tmp_path):
    first, second = {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}
    prints = [
        load_dataset(write_lines(tmp_path / "d.jsonl", *records)).fingerprint
        for records in (
            [first, second],
            [{**first, "note": 1}, second],
            [second, first],
            [first],
            [first, {**second, "answer": "3"}],
        )
    ]
    assert len(set(prints)) == 5


def test_an_absent_file_is_named_by_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=str(tmp_path / "absent.jsonl")):
        load_dataset("absent.jsonl")


def test_another_kind_of_file_is_refused_with_the_kinds_that_work(tmp_path):
    (tmp_path / "d.txt").write_text("hi")
    for path in (tmp_path, tmp_path / "d.txt"):
        with pytest.raises(InputError, match=r"\.jsonl, \.json, \.parquet"):
            load_dataset(str(path))


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_an_input_error(tmp_path, text):
    (tmp_path / "d.jsonl").write_text(text)
    with pytest.raises(InputError, match="holds no rows"):
        load_dataset(str(tmp_path / "d.jsonl"))


def test_a_malformed_line_is_named(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "p"}\n{"prompt": \n')
    with pytest.raises(InputError, match=r"d\.jsonl:2: not JSON"):
        load_dataset(str(tmp_path / "d.jsonl"))


def test_a_truncated_parquet_file_is_an_input_error(tmp_path):
    path = Path(write_parquet(tmp_path / "d.parquet", [{"prompt": "p"}]))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=rf"^data\.source: {path}: not a readable Parquet file"):
        load_dataset(str(path))


@pytest.mark.parametrize("chosen", [{}, {"prompt_column": "query"}, {"answer_column": "target"}])
def test_a_missing_column_is_an_error_that_lists_those_found(tmp_path, chosen):
    record = {"text": "t", "meta": {"key": 1}} | ({"prompt": "p"} if "answer_column" in chosen else {})
    with pytest.raises(InputError, match=r"has no column .*it has: text, meta, meta\.key"):
        load_dataset(write_lines(tmp_path / "d.jsonl", record), **chosen)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": None}, "prompt: the prompt is empty"),
        ({"prompt": ""}, "prompt: the prompt is empty"),
        ({"prompt": []}, "prompt: the prompt is empty"),
        ({"prompt": " \n"}, "prompt: the prompt is blank"),
        ({"other": 1}, "prompt: the prompt is empty"),
        ({"prompt": 7}, "expected text or a list of chat messages, got int"),
        ({"prompt": ["hi"]}, "needs `role` and `content`"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "needs `role` and `content`"),
        (
            {"prompt": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
            "assistant's turn",
        ),
        ({"prompt": "p", "answer": ["1"]}, "answer: expected text, a number or null, got list"),
        ({"prompt": "p", "answer": True}, "answer: expected text, a number or null, got bool"),
    ],
)
def test_an_unusable_row_is_named_by_its_line(tmp_path, record, message):
    path = write_lines(tmp_path / "d.jsonl", {"prompt": "p", "answer": "1"}, record)
    with pytest.raises(InputError, match=message) as raised:
        load_dataset(path)
    assert f"{path}:2: " in str(raised.value)


def test_an_unusable_parquet_row_is_named_by_its_number(tmp_path):
    path = write_parquet(tmp_path / "d.parquet", [{"prompt": "p"}, {"prompt": None}])
    with pytest.raises(InputError, match=r"d\.parquet row 1: prompt: the prompt is empty"):
        load_dataset(path)
