"""Samples as JSON objects: what the verbs write for each other, and read back.

Every float32 is written as the float64 of the same value, so it comes back bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from app.records.sample import Prompt, Sample
from settings.errors import InputError

REQUIRED_FIELDS = (
    "uid",
    "group_id",
    "sample_index",
    "prompt",
    "completion",
    "prompt_token_ids",
    "completion_token_ids",
    "behavior_logprobs",
    "finish_reason",
    "policy_version",
)
OPTIONAL_SCALARS: dict[str, tuple[type, ...]] = {"worker": (str,), "segments": (int,), "elapsed_s": (int, float)}
"""Optional fields with a default in `Sample`."""
PER_TOKEN_FIELDS = (
    "kept_mass_logs",
    "token_rewards",
    "policy_logprobs",
    "reference_logprobs",
    "values",
    "advantages",
    "returns",
)
"""Optional floats, one per completion token (`values` may have one more)."""
REWARD_FIELDS = frozenset({"reward", "token_rewards"})
"""Numbers that may be written as booleans, as masks may be written as 0 and 1."""
KNOWN_FIELDS = {
    *REQUIRED_FIELDS,
    *OPTIONAL_SCALARS,
    *PER_TOKEN_FIELDS,
    "answer",
    "columns",
    "loss_mask",
    "reward",
    "rewards",
    "policy_versions",
}
TOKEN_IDS = "completion_token_ids"
INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)


def sample_to_record(sample: Sample) -> dict[str, Any]:
    """The sample as a JSON object; fields whose room has not run are absent.

    `policy_version` is of the oldest token; `policy_versions`, of each token, is there only where several versions drew
    them. `columns` holds the other columns of the data set's row; unknown fields of the file that the sample came from
    stand at the end, as they were.
    """
    prompt = sample.prompt
    record: dict[str, Any] = {
        "uid": sample.uid,
        "group_id": sample.group_id,
        "sample_index": sample.sample_index,
        "prompt": prompt.source,
        "completion": sample.completion,
        "answer": prompt.answer,
        "prompt_token_ids": prompt.token_ids.tolist(),
        "completion_token_ids": sample.completion_ids.tolist(),
        "behavior_logprobs": sample.behavior_logprobs.tolist(),
        "finish_reason": sample.finish_reason,
        "policy_version": sample.policy_version,
        "worker": sample.worker,
        "segments": sample.segments,
        "elapsed_s": sample.elapsed_s,
    }
    for name in ("loss_mask", *PER_TOKEN_FIELDS):
        if (array := getattr(sample, name)) is not None:
            record[name] = array.tolist()
    if sample.policy_versions is not None:
        record["policy_versions"] = sample.policy_versions.tolist()
    if sample.rewards is not None:
        record["rewards"] = dict(sample.rewards)
    if sample.reward is not None:
        record["reward"] = sample.reward
    if prompt.extra:
        record["columns"] = dict(prompt.extra)
    assert not record.keys() & sample.extra.keys(), "a known field stands in Sample.extra"
    return record | dict(sample.extra)


def sample_from_record(record: Mapping[str, Any], *, where: str) -> Sample:
    """The sample that a JSON object describes; fields it does not know go to `Sample.extra`.

    `where` opens every error, for example `rollouts.jsonl:12`.

    Raises:
        InputError: a required field is absent, or a field has the wrong type, length or range.
    """
    _check_present(REQUIRED_FIELDS, record, where)
    fields = _RecordReader(record, where)
    prompt, sample_index = _read_prompt(fields)
    completion_ids = fields.token_ids("completion_token_ids")
    num_tokens = len(completion_ids)
    unknown = {name: value for name, value in record.items() if name not in KNOWN_FIELDS}
    if "columns" in record and not isinstance(record["columns"], dict):
        unknown["columns"] = record["columns"]
    return Sample(
        prompt=prompt,
        sample_index=sample_index,
        group_id=fields.scalar("group_id", int),
        completion_ids=completion_ids,
        completion=fields.scalar("completion", str),
        behavior_logprobs=fields.floats("behavior_logprobs", num_tokens),
        finish_reason=fields.scalar("finish_reason", str),
        policy_version=fields.scalar("policy_version", int),
        extra=unknown,
        **_read_optional(fields, num_tokens),
    )


def sample_for_advantages(
    record: Mapping[str, Any], *, where: str, bootstrap_truncated: bool, needs_logprobs: bool
) -> Sample:
    """What advantage estimation reads of a JSON object that needs no other field of a sample; the rest is left empty.

    Its `finish_reason` is `length` where it goes on with the value behind its last token, and `stop` where it is over.
    Without `finish_reason`, it goes on where there is such a value.

    Args:
        bootstraps: samples that were cut (`finish_reason: length`) go on.
        needs_logprobs: there is a penalty by `policy_logprobs` and `reference_logprobs`.

    Raises:
        InputError: what is read is absent, or a field has the wrong type, length or range.
    """
    _check_advantage_inputs(record, where, needs_logprobs=needs_logprobs)
    fields = _RecordReader(record, where)
    per_token = (TOKEN_IDS, "token_rewards", "loss_mask", "values")
    counted = next(name for name in per_token if record.get(name) is not None)
    num_tokens = len(fields.floats("values")) if counted == "values" else fields.length(counted)
    optional: dict[str, Any] = {}
    logprobs = ("policy_logprobs", "reference_logprobs") if needs_logprobs else ()
    for name in ("values", "token_rewards", *logprobs):
        if record.get(name) is not None:
            optional[name] = fields.floats(name, num_tokens, length_field=counted)
    if record.get("loss_mask") is not None:
        optional["loss_mask"] = fields.booleans("loss_mask", num_tokens, length_field=counted)
    goes_on = len(optional["values"]) > num_tokens
    if record.get("finish_reason") is not None:
        was_cut = fields.scalar("finish_reason", str) == "length"
        if was_cut and bootstrap_truncated and not goes_on:
            raise InputError(
                f"{where}: values has {num_tokens} entries, expected {num_tokens + 1}: the sample was cut "
                "(`length`), and goes on with the value behind its last token; under algorithm.bootstrap_truncated "
                "`grpo score --role critic` writes it"
            )
        goes_on = was_cut and bootstrap_truncated
    if "token_rewards" not in optional:
        optional["reward"] = _read_reward(fields, optional.get("loss_mask"))
    return Sample(
        prompt=Prompt(uid="", token_ids=np.zeros(0, np.int32), source="", answer=None),
        sample_index=0,
        group_id=0,
        completion_ids=np.zeros(num_tokens, np.int32),
        completion="",
        behavior_logprobs=np.zeros(num_tokens, np.float32),
        finish_reason="length" if goes_on else "stop",
        policy_version=0,
        **optional,
    )


def _check_advantage_inputs(record: Mapping[str, Any], where: str, *, needs_logprobs: bool) -> None:
    if record.get("values") is None:
        raise InputError(
            f"{where}: missing values, a number for each completion token; `grpo score --role critic` adds them"
        )
    if not needs_logprobs:
        return
    for role in ("policy", "reference"):
        if record.get(f"{role}_logprobs") is None:
            raise InputError(
                f"{where}: missing {role}_logprobs, which the KL penalty in the reward is made of; `grpo score --role "
                f"{role}` adds them, and algorithm.beta: 0 does without the penalty"
            )


def _read_reward(fields: _RecordReader, mask: np.ndarray | None) -> float:
    """The sample's reward; 0 where it has no token that could earn it."""
    if fields.record.get("reward") is not None:
        return fields.reward()
    if mask is not None and not mask.any():
        return 0.0
    raise InputError(
        f"{fields.where}: missing reward, or token_rewards, a number for each completion token; "
        "`grpo score --role reward` adds a reward"
    )


def _check_present(names: Sequence[str], record: Mapping[str, Any], where: str) -> None:
    missing = [name for name in names if name not in record]
    if missing:
        raise InputError(
            f"{where}: missing {', '.join(missing)}; a sample needs {', '.join(names)}"
            " (`grpo rollout` writes such files)"
        )


def _read_optional(fields: _RecordReader, num_tokens: int) -> dict[str, Any]:
    record = fields.record
    optional: dict[str, Any] = {
        name: fields.floats(name, num_tokens) for name in PER_TOKEN_FIELDS if record.get(name) is not None
    }
    for name, types in OPTIONAL_SCALARS.items():
        if record.get(name) is not None:
            optional[name] = fields.scalar(name, *types)
    if record.get("loss_mask") is not None:
        optional["loss_mask"] = fields.booleans("loss_mask", num_tokens)
    if record.get("policy_versions") is not None:
        optional["policy_versions"] = fields.versions("policy_versions", num_tokens)
    if record.get("rewards") is not None:
        optional["rewards"] = fields.rewards()
    if record.get("reward") is not None:
        optional["reward"] = fields.reward()
    return optional


def _read_prompt(fields: _RecordReader) -> tuple[Prompt, int]:
    record, where = fields.record, fields.where
    uid, sample_index = fields.scalar("uid", str), fields.scalar("sample_index", int)
    suffix = f"/s{sample_index}"
    if not uid.endswith(suffix) or uid == suffix:
        raise InputError(f"{where}: uid: expected `<prompt uid>{suffix}`, got {uid!r}")
    source = record["prompt"]
    if not isinstance(source, (str, list)):
        raise InputError(f"{where}: prompt: expected text or chat messages, got {type(source).__name__}")
    columns = record.get("columns")
    prompt = Prompt(
        uid=uid.removesuffix(suffix),
        token_ids=fields.prompt_ids(),
        source=source,
        answer=fields.scalar("answer", str) if record.get("answer") is not None else None,
        extra=columns if isinstance(columns, dict) else {},
    )
    return prompt, sample_index


class _RecordReader:
    """Typed access to one record; every method raises InputError naming the field."""

    def __init__(self, record: Mapping[str, Any], where: str) -> None:
        self.record = record
        self.where = where

    def scalar(self, name: str, *types: type) -> Any:
        value = self.record[name]
        # type() and not isinstance: JSON's true is an int to Python.
        if type(value) not in types or (type(value) is float and not math.isfinite(value)):
            expected = " or ".join(kind.__name__ for kind in types)
            raise InputError(f"{self.where}: {name}: expected {expected}, got {_describe_value(value)}")
        return value

    def prompt_ids(self) -> np.ndarray:
        ids = self.token_ids("prompt_token_ids")
        if not len(ids):
            raise InputError(f"{self.where}: prompt_token_ids is empty; a completion needs a token before it")
        return ids

    def token_ids(self, name: str, expected: str = "token ids (integers >= 0)") -> np.ndarray:
        def is_id(value: Any) -> bool:
            return type(value) is int and 0 <= value <= INT32_MAX

        return np.array(self._array(name, expected, is_id), np.int32)

    def floats(self, name: str, num_tokens: int | None = None, *, length_field: str = TOKEN_IDS) -> np.ndarray:
        """Of any number where `num_tokens` is None; `than` is the field that has as many as tokens."""
        numbers = (int, float, bool) if name in REWARD_FIELDS else (int, float)

        def is_float32(value: Any) -> bool:
            return type(value) in numbers and abs(value) <= FLOAT32_MAX

        values = self._array(name, "finite float32 numbers", is_float32)
        if num_tokens is not None:
            allowed = (num_tokens, num_tokens + 1) if name == "values" else (num_tokens,)
            self._check_length(name, len(values), allowed, length_field)
        return np.array(values, np.float32)

    def booleans(self, name: str, num_tokens: int, *, length_field: str = TOKEN_IDS) -> np.ndarray:
        # JSON's true is Python's True, which equals 1.
        values = self._array(name, "booleans, or 0 and 1", lambda value: type(value) in (bool, int) and value in (0, 1))
        self._check_length(name, len(values), (num_tokens,), length_field)
        return np.array(values, bool)

    def versions(self, name: str, num_tokens: int) -> np.ndarray:
        versions = self.token_ids(name, "versions (integers >= 0)")
        self._check_length(name, len(versions), (num_tokens,), TOKEN_IDS)
        oldest = self.scalar("policy_version", int)
        if len(versions) and versions.min() != oldest:
            raise InputError(
                f"{self.where}: {name}: the oldest is {versions.min()}, and policy_version {oldest}; they are the same"
            )
        return versions

    def length(self, name: str) -> int:
        return len(self._array(name, "entries, one per completion token", lambda value: True))

    def reward(self) -> float:
        reward = float(self.scalar("reward", int, float, bool))
        if abs(reward) > FLOAT32_MAX:
            raise InputError(f"{self.where}: reward: expected a finite float32 number, got {_describe_value(reward)}")
        return reward

    def rewards(self) -> dict[str, float]:
        value = self.record["rewards"]
        if not isinstance(value, dict):
            raise InputError(f"{self.where}: rewards: expected an object, got {_describe_value(value)}")
        fields = _RecordReader(value, f"{self.where}: rewards")
        return {name: float(fields.scalar(name, int, float)) for name in value}

    def _array(self, name: str, expected: str, accepts: Callable[[Any], bool]) -> list[Any]:
        values = self.record[name]
        if not isinstance(values, list):
            raise InputError(f"{self.where}: {name}: expected a list of {expected}, got {_describe_value(values)}")
        for index, value in enumerate(values):
            if not accepts(value):
                raise InputError(f"{self.where}: {name}[{index}]: expected {expected}, got {_describe_value(value)}")
        return values

    def _check_length(self, name: str, length: int, allowed: tuple[int, ...], length_field: str) -> None:
        if length not in allowed:
            beside = "" if length_field == TOKEN_IDS else f", as {length_field} has {allowed[0]}"
            raise InputError(
                f"{self.where}: {name} has {length} entries, expected {' or '.join(map(str, allowed))}:"
                f" one per completion token{beside}"
            )


def _describe_value(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"
