"""Tests data sets (files, the hub, held-out rows, mixtures) and how their rows are encoded as prompts."""

import gzip
import json
from datetime import datetime
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.prompts.chat import split_completion
from app.prompts.curriculum import PassRateOrder
from app.prompts.data_sources import load_held_out_data, load_training_data, make_prompt_order
from app.prompts.dataset import DatasetRow, load_dataset
from app.prompts.encode import encode_prompts
from app.prompts.prompt_order import MixtureOrder
from app.records.sample import Prompt
from app.records.typed_values import from_json
from settings.errors import InputError
from settings.schema.data import DataSettings


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def write_parquet(path, records):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return str(path)


def write_rows(path, count):
    return write_lines(path, *({"prompt": f"p{i}", "answer": str(i)} for i in range(count)))


@pytest.mark.parametrize(("split", "size"), [("train", 7473), ("test", 1319)])
def test_gsm8k_files_are_read_unchanged(gsm8k_dir, split, size):
    dataset = load_dataset(str(gsm8k_dir / f"{split}.jsonl"))
    assert len(dataset.rows) == size
    assert dataset.column_mapping == {"prompt": "question", "answer": "answer"}
    assert dataset.rows[17].uid == f"{split}/17"
    assert all(row.answer and "\n#### " in row.answer for row in dataset.rows)


@pytest.mark.parametrize(
    ("prompt", "answer"), [("prompt", "ground_truth"), ("question", "solution"), ("problem", "answer")]
)
def test_prompt_and_answer_columns_are_found_by_their_usual_names(tmp_path, prompt, answer):
    rows = [{"id": 9, prompt: "1 + 1?", answer: 2}, {prompt: "q"}, {prompt: "r"}]
    path = write_lines(tmp_path / "d.jsonl", *rows)
    dataset = load_dataset(path)
    row, without_answer, _ = dataset.rows
    assert (row.uid, row.prompt, row.answer, row.extra) == ("d/0", "1 + 1?", 2, {"id": 9})
    assert without_answer.answer is None
    assert dataset.column_mapping == {"prompt": prompt, "answer": answer}
    columns = f"prompt from {prompt}, answer from {answer}, 2 without an answer"
    assert dataset.to_text() == f"{path}: 3 rows ({columns})"


def test_chosen_columns_take_precedence_over_usual_names(tmp_path):
    chat = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "u"}]
    record = {"prompt": "p", "messages": chat, "answer": "a", "meta": {"key": 1.5}}
    dataset = load_dataset(
        write_lines(tmp_path / "d.jsonl", record), prompt_column="messages", answer_column="meta.key"
    )
    (row,) = dataset.rows
    assert (row.prompt, row.answer) == ([{"role": m["role"], "content": m["content"]} for m in chat], 1.5)
    assert dataset.to_text().endswith("1 row (prompt from messages, answer from meta.key)")


def test_verl_parquet_files_are_read(tmp_path):
    record = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": 2, "numbers": [1, 1]}},
        "extra_info": {"index": 0},
        "typed": {"price": Decimal("1.50"), "at": datetime(2025, 1, 1), "raw": b"\xff", "nan": float("nan")},
    }
    dataset = load_dataset(write_parquet(tmp_path / "verl.parquet", [record]))
    (row,) = dataset.rows
    assert row.prompt == record["prompt"] and row.answer == {"target": 2, "numbers": [1, 1]}
    assert dataset.column_mapping == {"prompt": "prompt", "answer": "reward_model.ground_truth"}
    assert row.extra["extra_info"] == {"index": 0}
    assert from_json(row.extra["typed"]) == {**record["typed"], "nan": None}


CHAT = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("record", "prompt", "completion"),
    [
        ({"prompt": "1 + 1?", "completion": "2"}, "1 + 1?", "2"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:2], "answer": "3"}, CHAT[:1], CHAT[1:2]),
        ({"messages": CHAT}, CHAT[:1], CHAT[1:]),
        ({"prompt": "other", "messages": CHAT}, CHAT[:1], CHAT[1:]),
        ({"question": "1 + 1?", "response": "two", "answer": "2"}, "1 + 1?", "two"),
        ({"question": "1 + 1?", "answer": 2}, "1 + 1?", "2"),
        (
            {"prompt": CHAT[:1], "reward_model": {"ground_truth": "2"}, "extra_info": {"answer": "It is 2"}},
            CHAT[:1],
            "It is 2",
        ),
    ],
    ids=["text", "chats", "messages", "messages-and-prompt", "response", "answer", "verl"],
)
def test_completions_are_read_from_columns_with_usual_names(tmp_path, record, prompt, completion):
    path = write_lines(tmp_path / "d.jsonl", record)
    dataset = load_dataset(path, reads_completions=True)
    (row,) = dataset.rows
    expected = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    assert (row.prompt, split_completion(row.answer, "")[1]) == (prompt, expected)
    changed = json.loads(json.dumps(record).replace("2", "4"))
    other = load_dataset(write_lines(tmp_path / "e.jsonl", changed), reads_completions=True)
    assert other.fingerprint != dataset.fingerprint


def test_the_column_of_completions_can_be_chosen(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", {"prompt": "p", "completion": "c", "meta": {"text": "t"}})
    (row,) = load_dataset(path, reads_completions=True, answer_column="meta.text").rows
    assert split_completion(row.answer, "")[1] == [{"role": "assistant", "content": "t"}]
    with pytest.raises(InputError, match=r"^data\.answer_column: .* has no column gone; it has: prompt, comp"):
        load_dataset(path, reads_completions=True, answer_column="gone")
    with pytest.raises(InputError, match=r"has no column completion, response, messages, answer, "):
        load_dataset(write_lines(tmp_path / "e.jsonl", {"prompt": "p"}), reads_completions=True)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "q", "completion": None}, "2: completion: expected a completion as text or chat, got None; remove"),
        ({"prompt": "q", "completion": " "}, "2: completion: expected a completion as text or chat, got ' '"),
        (
            {"prompt": "q", "completion": CHAT[:1]},
            "2: completion: no message has the role assistant, so there is nothing",
        ),
        (
            {"prompt": "q", "completion": [{"role": "assistant", "content": 5}]},
            "2: completion: `content` of a chat message must be",
        ),
    ],
)
def test_a_row_without_a_usable_completion_is_refused(tmp_path, record, message):
    path = write_lines(tmp_path / "d.jsonl", {"prompt": "p", "completion": "c"}, record)
    with pytest.raises(InputError, match=f"d.jsonl:{message}"):
        load_dataset(path, reads_completions=True)


def test_a_conversation_that_the_assistant_begins_is_refused(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", {"messages": CHAT[1:]})
    with pytest.raises(InputError, match="messages: the prompt is empty"):
        load_dataset(path, reads_completions=True)


def test_a_hub_data_set_is_read_through_the_datasets_library(tmp_path, monkeypatch):
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
    with pytest.raises(InputError, match=r"data.source: hf:.*absent.*cannot be loaded"):
        load_dataset(f"hf:{tmp_path}/absent/too/deep", split="train")


def test_shards_of_a_folder_or_a_pattern_are_read_as_one_data_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        (tmp_path / "d" / f"part{number}").mkdir(parents=True)
        write_parquet(
            tmp_path / "d" / f"part{number}" / "train.parquet", [{"prompt": f"p{number}{i}"} for i in range(2)]
        )
    (tmp_path / "d" / "_SUCCESS.json").write_text("")
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "p"}\n'))
    for source in ("d", "d/*/train.parquet", "d/**/*.parquet"):
        rows = load_dataset(source).rows
        assert [row.prompt for row in rows] == ["p00", "p01", "p10", "p11"]
        assert [row.uid for row in rows] == ["part0/train/0", "part0/train/1", "part1/train/0", "part1/train/1"]
        assert rows[3].where == "d/part1/train.parquet row 1"
    assert [(row.uid, row.where) for row in load_dataset("e.jsonl.gz").rows] == [("e/0", "e.jsonl.gz:1")]
    write_parquet(tmp_path / "d" / "test.parquet", [{"prompt": "p"}])
    with pytest.raises(
        InputError, match=r"d mixes splits or file formats \(for .*test\.parquet.* such as d/train\*\.parquet"
    ):
        load_dataset("d")


def test_a_column_with_an_unsupported_type_is_omitted_and_reported(monkeypatch, caplog):
    import datasets

    rows = [{"question": "1?", "image": None}, {"question": "2?", "image": object()}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: SimpleNamespace(to_list=lambda: rows))
    assert [row.extra for row in load_dataset("hf:a/b").rows] == [{}, {}]
    (record,) = caplog.records
    assert record.getMessage().startswith("hf:a/b train row 1: column image is left out: Object of type object")


def test_the_data_fingerprint_depends_on_all_columns_and_the_row_order(tmp_path):
    first, second = {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}
    prints = [
        load_dataset(write_lines(tmp_path / "d.jsonl", *records)).fingerprint
        for records in (
            *([first, second], [{**first, "note": 1}, second], [second, first], [first]),
            [first, {**second, "answer": "3"}],
        )
    ]
    assert len(set(prints)) == 5


def test_unusable_data_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path / "d.parquet", [{"prompt": "p"}, {"prompt": None}])
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "d.parquet").read_bytes()[:-20])
    (tmp_path / "bare").mkdir()
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "p"}\n')[:-9])
    files = {"d.txt": "hi", "empty.jsonl": "\n\n", "damaged.jsonl": '{"prompt": "p"}\n{"prompt": \n'}
    (tmp_path / "plain.json.gz").write_text('{"prompt": "p"}')
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for source, message in {
        "absent.jsonl": f"data.source: {tmp_path / 'absent.jsonl'}: no such file",
        "absent/data": "no such file; correct the path, or write hf:absent/data for a hub data set",
        "d.txt": r"d\.txt: expected a file ending in \.jsonl, \.json, \.jsonl\.gz, \.json\.gz or \.parquet",
        ".": r"mixes splits or file formats \(.*\); select the files with a pattern, such as",
        "bare": r"the folder .*bare contains no files ending in \.jsonl, \.json, .* or .*; name another folder",
        "e*.csv": r"data\.source: no file matches .*e\*\.csv",
        "cut.jsonl.gz": r"cut\.jsonl\.gz: cannot be read: Compressed file ended",
        "plain.json.gz": r"plain\.json\.gz: cannot be read: Not a gzipped file",
        "empty.jsonl": "data.source: empty.jsonl contains no rows",
        "damaged.jsonl": r"damaged\.jsonl:2: not JSON",
        "d.parquet": r"d\.parquet row 1: prompt: the prompt is empty",
        "cut.parquet": r"^data\.source: .*cut\.parquet: cannot be read as Parquet",
    }.items():
        with pytest.raises(InputError, match=message):
            load_dataset(source)


def test_error_about_a_missing_column_lists_the_columns_found(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", {"text": "t", "meta": {"key": 1}})
    unusable: list[dict[str, Any]] = [{}, {"prompt_column": "query"}]
    unusable.append({"prompt_column": "text", "answer_column": "target"})
    for chosen in unusable:
        with pytest.raises(InputError, match=r"has no column .*it has: text, meta, meta\.key"):
            load_dataset(path, **chosen)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        *((row, "prompt: the prompt is empty") for row in ({"prompt": None}, {"prompt": []}, {"other": 1})),
        ({"prompt": " \n"}, "prompt: the prompt is blank"),
        ({"prompt": 7}, "expected text or chat messages as prompt, got 7; correct or remove the row"),
        ({"prompt": ["hi"]}, "needs `role` and `content`"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "reads only text, but .*'image'"),
        ({"prompt": [{"role": "user", "content": None}]}, "must be text or a list of parts"),
        ({"prompt": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}, "assistant's turn"),
    ],
)
def test_error_about_an_unusable_row_names_its_line(tmp_path, record, message):
    path = write_lines(tmp_path / "d.jsonl", {"prompt": "p", "answer": "1"}, record)
    with pytest.raises(InputError, match=message) as raised:
        load_dataset(path)
    assert f"{path}:2: " in str(raised.value)


def test_held_out_rows_are_evenly_spaced_and_come_from_training_data_only_on_request(tmp_path):
    data = DataSettings(source="unread.jsonl", eval_source=write_rows(tmp_path / "test.jsonl", 100))
    chosen = load_held_out_data(data, num_prompts=4)
    assert [row.prompt for row in chosen.rows] == ["p0", "p25", "p50", "p75"]
    assert len(load_held_out_data(data, num_prompts=1000).rows) == 100
    path = write_rows(tmp_path / "train.jsonl", 3)
    with pytest.raises(InputError, match=r"data\.eval_source is not set"):
        load_held_out_data(DataSettings(source=path), num_prompts=2)
    assert len(load_held_out_data(DataSettings(source=path, eval_source=path), num_prompts=2).rows) == 2


def test_rows_of_a_mixture_name_their_source(tmp_path):
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


def test_held_out_hub_data_uses_the_revision_of_its_own_source(monkeypatch):
    import datasets

    rows, commits = datasets.Dataset.from_list([{"question": "1 + 1?", "answer": "2"}]), []
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, revision, split: commits.append((revision, split)) or rows)
    for sources in ({"source": "hf:a/b@abc"}, {"source": "a.jsonl", "eval_source": "hf:a/c:main"}):
        load_held_out_data(DataSettings.model_validate(sources), num_prompts=1)
    assert commits == [("abc", "test"), (None, "test")]


def test_mixture_sources_have_their_own_splits_and_weights():
    parts = [{"source": "builtin:arithmetic", "split": split} for split in ("train", "test")]
    mixed = load_training_data(DataSettings.model_validate({"source": parts, "num_problems": 20}), seed=0)
    assert len({str(row.prompt) for row in mixed.rows}) == 40
    with pytest.raises(InputError, match="no 'builtin:algebra'; the only built-in data set is builtin:arithmetic"):
        load_training_data(DataSettings(source="builtin:algebra"), seed=0)
    data = DataSettings.model_validate({"source": ["a.jsonl", {"source": "b.jsonl", "weight": 3}]})
    prompts = [Prompt(f"{i % 2}/x/{i}", np.zeros(1, np.int32), "p", None) for i in range(10)]
    order = make_prompt_order(data, prompts, seed=1)
    assert isinstance(order, MixtureOrder)
    assert sum(index % 2 for index in order.row_indices(0, 8)) == 6
    curriculum = make_prompt_order(data.model_copy(update={"curriculum": "pass_rate"}), prompts, seed=1)
    assert isinstance(curriculum, PassRateOrder)
    curriculum.observe((prompt.uid, 1.0) for prompt in prompts[1::2])
    # The second source makes up three quarters, although all its prompts are solved.
    first = [int(curriculum.row_indices(position, 10)[0]) for position in range(1000)]
    assert np.mean([index % 2 for index in first]) == pytest.approx(0.75, abs=0.06)


class WordTokenizer:
    def chat_ids(self, messages):
        """Returns one token per word, its length, after 100 + the first letter of the role of each message."""
        ids = []
        for message in messages:
            ids += [100 + ord(message["role"][0]), *self.text_ids(message["content"])]
        return ids

    def text_ids(self, text):
        return [len(word) for word in text.split()]


USER, SYSTEM, ASSISTANT = (100 + ord(letter) for letter in "usa")


def row(prompt, uid="d/0", **columns):
    return DatasetRow(uid=uid, prompt=prompt, answer="1", extra=columns)


def encode(rows, system_prompt=None, max_prompt_length=4, overlong: Any = "drop"):
    data = DataSettings(system_prompt=system_prompt, max_prompt_length=max_prompt_length, overlong_prompts=overlong)
    tokenizer: Any = WordTokenizer()
    return encode_prompts(rows, tokenizer, data)


def test_the_system_prompt_comes_first_and_replaces_system_messages_of_rows():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bb"}]
    (one, two), _ = encode(
        [row(chat), row([{"role": "system", "content": "own"}, *chat])], system_prompt="dddd", max_prompt_length=9
    )
    assert one.token_ids.tolist() == two.token_ids.tolist() == [SYSTEM, 4, USER, 1, ASSISTANT, 2]
    assert one.source == chat


def test_overlong_prompts_are_dropped_truncated_or_refused_and_counted():
    rows = [row("a", "d/0"), row("a bb ccc dddd eeeee", "d/1"), row("a b c", "d/2")]
    prompts, report = encode(rows)
    assert ([prompt.uid for prompt in prompts], report.num_dropped) == (["d/0", "d/2"], 1)
    assert report.text == "prompts: 2 kept, 1 dropped, 0 truncated (data.max_prompt_length 4); longest 6 tokens"
    prompts, report = encode(rows, overlong="truncate_left")
    assert [prompt.token_ids.tolist() for prompt in prompts] == [[USER, 1], [2, 3, 4, 5], [USER, 1, 1, 1]]
    assert (report.num_dropped, report.text[:44]) == (0, "prompts: 3 kept, 0 dropped, 1 truncated (dat")
    with pytest.raises(InputError, match=r"_length = 4 .* 2 of 4 prompts: .*first is d/9 with 5.*longest has 6"):
        encode([row("a b c d", "d/9"), *rows], overlong="error")
    assert len(encode(rows[:1], overlong="error")[0]) == 1
    with pytest.raises(InputError, match=r"_length = 4 is too short for every prompt: .*shortest has 5.*truncate_left"):
        encode([row("a b c d"), rows[1]])


def test_error_about_an_unencodable_row_names_its_location():
    for where, shown in (("a.jsonl:3", "a.jsonl:3"), ("", "a/2")):
        row = DatasetRow(uid="a/2", prompt="x" * 1_000_001, answer=None, where=where)
        with pytest.raises(InputError, match=f"^{shown}: the prompt has 1,000,001 characters"):
            encode([row])
    for prompt, answer, what in (("\ud800", None, "prompt"), ("x", "\ud800", "answer")):
        with pytest.raises(InputError, match=rf"^a/2: the {what} is not Unicode text: surrogates not allowed"):
            encode([DatasetRow(uid="a/2", prompt=prompt, answer=answer)])
