import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from app.records.sample import EPISODE_ENDS, Episode, Prompt, Sample, Turn
from app.records.sample_json import sample_from_record, sample_to_record
from settings.errors import InputError

RECORD: dict[str, Any] = {
    "uid": "gsm8k/train/17/s3",
    "group_id": 5,
    "sample_index": 3,
    "prompt": "What is 1 + 1?",
    "completion": "2",
    "answer": "#### 2",
    "prompt_token_ids": [1, 2, 3],
    "completion_token_ids": [7, 0],
    "behavior_logprobs": [-0.5, -0.25],
    "finish_reason": "stop",
    "policy_version": 4,
}
ROUTES = {"num_layers": 2, "experts_per_token": 1, "ids": ""}
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def through_json(record):
    return json.loads(json.dumps(record, allow_nan=False))


def assert_same(left, right):
    for field in fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), field.name
        elif isinstance(a, Prompt):
            assert_same(a, b)
        else:
            assert a == b, field.name


@st.composite
def episodes(draw, length):
    places = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
    words = st.dictionaries(st.text(), st.floats(-9, 9), max_size=2)
    answers = st.just([]) | st.just([{"role": "tool", "content": "4"}, {"role": "user", "content": "?"}])
    turns = [
        Turn(
            start,
            end,
            draw(answers),
            draw(st.floats(-9, 9)),
            draw(st.floats(0, 9)),
            text=draw(st.text()),
            metrics=draw(words),
        )
        for start, end in zip(places[::2], places[1::2], strict=False)
    ]
    return Episode(tuple(turns), draw(st.sampled_from(EPISODE_ENDS)), draw(words))


@st.composite
def samples(draw):
    length, num_prompt = draw(st.integers(0, 6)), draw(st.integers(1, 4))
    floats = arrays(np.float32, length, elements=FLOAT32)
    maybe = st.none() | floats
    version = draw(st.integers(0, 99))
    episode = draw(st.none() | episodes(length))
    mask = draw(st.none() | arrays(bool, length))
    completion = draw(st.text())
    if episode is not None:
        written = [any(turn.start <= i < turn.end for turn in episode.turns) for i in range(length)]
        mask = np.array(written, bool) & (True if mask is None else mask)
        completion = episode.turns[-1].text if episode.turns else ""
    newer = arrays(np.int32, max(length - 1, 0), elements=st.integers(version, 99))
    versions = (st.none() | newer.map(lambda rest: np.append(rest, np.int32(version)))) if length else st.none()
    return Sample(
        prompt=Prompt(
            uid=draw(st.text(min_size=1)),
            token_ids=draw(arrays(np.int32, num_prompt, elements=st.integers(0, 2**31 - 1))),
            source=draw(st.text() | st.just([{"role": "user", "content": "hi"}])),
            answer=draw(st.none() | st.text()),
            extra=draw(st.just({}) | st.just({"difficulty": 2, "tags": ["a"]})),
        ),
        sample_index=draw(st.integers(0, 9)),
        group_id=draw(st.integers(0, 99)),
        completion_ids=draw(arrays(np.int32, length, elements=st.integers(0, 2**31 - 1))),
        completion=completion,
        behavior_logprobs=draw(floats),
        finish_reason=draw(st.sampled_from(["stop", "length", "dropped:late"])),
        policy_version=version,
        worker=draw(st.text()),
        routes=draw(st.none() | arrays(np.uint8, (num_prompt + length, 2, 3))),
        segments=draw(st.integers(1, 9)),
        elapsed_s=draw(st.floats(0, 1e6)),
        kept_mass_logs=draw(maybe),
        policy_versions=draw(versions),
        episode=episode,
        loss_mask=mask,
        rewards=draw(st.none() | st.just({"gsm8k": 1.0, "gsm8k_format": 0.0})),
        reward=draw(st.none() | st.floats(-9, 9)),
        policy_logprobs=draw(maybe),
        reference_logprobs=draw(maybe),
        values=draw(maybe | arrays(np.float32, length + 1, elements=FLOAT32)),
        advantages=draw(maybe),
        returns=draw(maybe),
        token_rewards=draw(maybe),
        extra=draw(st.just({}) | st.just({"my_scores": [0.1], "note": None})),
    )


@given(samples())
def test_every_sample_is_read_back_bit_for_bit(sample):
    record = through_json(sample_to_record(sample))
    again = sample_from_record(record, where="f:1")
    assert_same(sample, again)
    assert sample_to_record(again) == record


def test_unknown_fields_are_kept_and_missing_fields_are_not_written():
    # Without an episode, `messages` is an unknown field as well.
    unknown = {"my_note": {"x": [1, None]}, "my_scores": [0.0, 1.0], "messages": 1}
    for columns in ({}, {"columns": None}, {"columns": {"difficulty": 1}}):
        sample = sample_from_record({**RECORD, **unknown, **columns}, where="f:1")
        assert sample.prompt.uid == "gsm8k/train/17"
        written = sample_to_record(sample)
        assert {name: written[name] for name in unknown} == unknown
        assert {name: written[name] for name in written if name == "columns"} == columns
        assert not {"values", "reward", "rewards", "loss_mask", "advantages"} & written.keys()


def test_error_about_missing_fields_names_them_and_the_line():
    record = {key: value for key, value in RECORD.items() if key not in ("uid", "behavior_logprobs")}
    with pytest.raises(InputError, match=r"^samples.jsonl:12: missing uid and behavior_logprobs;"):
        sample_from_record(record, where="samples.jsonl:12")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"behavior_logprobs": [-0.5]}, "behavior_logprobs has length 1, expected 2"),
        ({"policy_versions": [4, -1]}, r"policy_versions\[1\]: expected versions \(integers >= 0\), got int -1"),
        ({"values": [0.0] * 4}, "values has length 4, expected 2 or 3"),
        ({"loss_mask": [1, 2]}, r"loss_mask\[1\]: expected booleans, or 0 and 1, got int 2"),
        ({"completion_token_ids": [1, -1]}, r"completion_token_ids\[1\].*got int -1"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"behavior_logprobs": [1e39, 0.0]}, r"behavior_logprobs\[0\]"),
        ({"uid": "gsm8k/train/17"}, "uid: expected `<prompt uid>/s3`"),
        ({"group_id": 10**20}, "group_id: expected a 64-bit integer, got int 100000000000000000000"),
        ({"prompt": 2}, "prompt: expected text or chat messages"),
        ({"reward": float("inf")}, "reward: expected a finite float32 number"),
        ({"routes": ROUTES | {"num_layers": "2"}}, "routes.num_layers: expected an object of"),
        ({"routes": {"num_layers": 2, "ids": ""}}, "routes: expected an object of num_layers, experts_per_token and"),
        ({"routes": ROUTES | {"ids": "AAAA"}}, "routes.ids has 3 bytes, expected 10: one for each of 5 tokens of"),
        ({"routes": ROUTES | {"ids": "~"}}, "routes.ids: expected Base64, got '~'"),
        ({"rewards": {"gsm8k": "1"}}, "rewards.gsm8k: expected a number, got str"),
    ],
)
def test_an_invalid_field_of_a_sample_is_refused_with_its_line(change, message):
    with pytest.raises(InputError, match=message) as raised:
        sample_from_record({**RECORD, **change}, where="samples.jsonl:12")
    assert str(raised.value).startswith("samples.jsonl:12: ")


TURNS = [
    {"start": 0, "end": 1, "text": "6*7?", "messages": [{"role": "tool", "content": "42"}], "reward": 0.5},
    {"start": 3, "end": 5, "text": "42", "metrics": {"tool_calls": 1}},
]
EPISODE_RECORD = RECORD | {
    "completion": "42",
    "completion_token_ids": [1, 2, 3, 4, 5],
    "behavior_logprobs": [0.0] * 5,
    "loss_mask": [True, False, False, True, True],
    "episode": {"turns": TURNS, "end": "terminated", "scores": {"win": 1.0}},
}


def episode_with(turn: int | None = None, **changes: Any) -> dict[str, Any]:
    """Returns the episode with changed fields, either its own or those of one turn."""
    turns = [one | (changes if i == turn else {}) for i, one in enumerate(TURNS)]
    return EPISODE_RECORD["episode"] | {"turns": turns} | (changes if turn is None else {})


def test_an_episode_is_written_with_its_conversation():
    sample = sample_from_record(EPISODE_RECORD, where="f:1")
    assert sample.episode is not None and sample.episode.reward == 1.5
    assert sample.last_turn_ids.tolist() == [4, 5]
    written = sample_to_record(sample)
    roles = [(message["role"], message["content"]) for message in written["messages"][-3:]]
    assert roles == [("assistant", "6*7?"), ("tool", "42"), ("assistant", "42")]
    again = sample_from_record(through_json(written), where="f:1")
    assert again.extra == sample.extra and again.episode == sample.episode


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        (3, "episode: expected a dictionary or an instance of Episode, got 3"),
        (episode_with(end="bored"), "episode.end: expected terminated, .* got 'bored'"),
        (episode_with(turns=[{"start": 0, "end": 1}]), r"episode.turns.0.text: Field required"),
        (episode_with(0, reward=float("nan")), r"episode.turns.0.reward: expected a finite number, got nan"),
        (episode_with(1, start=0), r"episode.turns.1 is from 0 to 5; turns must be in order: expected 1 <= start"),
        (episode_with(1, end=6), r"episode.turns.1 is from 3 to 6; .* end <= 5, the number of completion_token_ids"),
        (episode_with(1, start=4), r"loss_mask\[3\] is true, but this token is in no policy turn"),
    ],
)
def test_an_invalid_episode_is_refused_with_the_name_of_the_field(episode, message):
    with pytest.raises(InputError, match=message) as raised:
        sample_from_record({**EPISODE_RECORD, "episode": episode}, where="samples.jsonl:12")
    assert str(raised.value).startswith("samples.jsonl:12: ") and "\n" not in str(raised.value)
