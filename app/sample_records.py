"""Samples as JSON objects: what the verbs write for each other, and read back.

Every float32 is written as the float64 of the same value, so it comes back bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32

from app.flow import Prompt, Sample
from settings.errors import InputError

REQUIRED = (
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
SCALARS: dict[str, tuple[type, ...]] = {"worker": (str,), "segments": (int,), "elapsed_s": (int, float)}
"""Optional fields with a default in `Sample`."""
PER_TOKEN = (
    "kept_mass_logs",
    "policy_logprobs",
    "reference_logprobs",
    "values",
    "advantages",
    "returns",
)
"""Optional floats, one per completion token (`values` may have one more)."""
KNOWN = {*REQUIRED, *SCALARS, *PER_TOKEN, "answer", "columns", "loss_mask", "reward", "rewards"}
TOKEN_IDS = "completion_token_ids"
INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)


def sample_to_record(sample: Sample) -> dict[str, Any]:
    """The sample as a JSON object; fields whose room has not run are absent.

    `columns` holds the other columns of the data set's row; unknown fields of the file that the
    sample came from stand at the end, as they were.
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
    for name in ("loss_mask", *PER_TOKEN):
        if (array := getattr(sample, name)) is not None:
            record[name] = array.tolist()
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
    _check_present(REQUIRED, record, where)
    fields = _Fields(record, where)
    prompt, sample_index = _read_prompt(fields)
    completion_ids = fields.token_ids("completion_token_ids")
    num_tokens = len(completion_ids)
    unknown = {name: value for name, value in record.items() if name not in KNOWN}
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


def token_ids_from_record(record: Mapping[str, Any], *, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Prompt ids [S] and completion ids [C] of a JSON object that needs no other field of a sample.

    Raises:
        InputError: as `sample_from_record`.
    """
    _check_present(("prompt_token_ids", "completion_token_ids"), record, where)
    fields = _Fields(record, where)
    return fields.prompt_ids(), fields.token_ids("completion_token_ids")


class Steps(NamedTuple):
    """A sample as advantage estimation sees it."""

    rewards: Float32[np.ndarray, "C"]
    values: Float32[np.ndarray, "C"]
    bootstrap: float
    """The value after the last token: 0 where `values` ends with it."""
    mask: Bool[np.ndarray, "C"]


def steps_from_record(record: Mapping[str, Any], *, where: str) -> Steps:
    """Rewards, values and mask of a JSON object that needs no other field of a sample.

    Without `token_rewards` the reward stands on the last token that the policy wrote.

    Raises:
        InputError: `values` or a reward is absent, or a field has the wrong type, length or range.
    """
    if record.get("values") is None:
        raise InputError(f"{where}: missing values, a number for each completion token: a critic's scoring adds them")
    fields = _Fields(record, where)
    per_token = (TOKEN_IDS, "token_rewards", "loss_mask", "values")
    counted = next(name for name in per_token if record.get(name) is not None)
    num_tokens = len(fields.floats("values")) if counted == "values" else fields.length(counted)
    values = fields.floats("values", num_tokens, than=counted)
    masked = record.get("loss_mask") is not None
    mask = fields.booleans("loss_mask", num_tokens, than=counted) if masked else np.ones(num_tokens, bool)
    if record.get("token_rewards") is not None:
        rewards = fields.floats("token_rewards", num_tokens, than=counted, accepts_booleans=True)
    else:
        rewards = np.zeros(num_tokens, np.float32)
        if mask.any():
            rewards[np.flatnonzero(mask)[-1]] = _sample_reward(fields)
    return Steps(rewards, values[:num_tokens], float(values[num_tokens:].sum()), mask)


def _sample_reward(fields: _Fields) -> float:
    if fields.record.get("reward") is None:
        raise InputError(
            f"{fields.where}: missing reward, or token_rewards, a number for each completion token; "
            "`grpo score --role reward` adds a reward"
        )
    reward = float(fields.scalar("reward", int, float, bool))
    if abs(reward) > FLOAT32_MAX:
        raise InputError(f"{fields.where}: reward: expected a finite float32 number, got {_shown(reward)}")
    return reward


def _check_present(names: Sequence[str], record: Mapping[str, Any], where: str) -> None:
    missing = [name for name in names if name not in record]
    if missing:
        raise InputError(
            f"{where}: missing {', '.join(missing)}; a sample needs {', '.join(names)}"
            " (`grpo rollout` writes such files)"
        )


def _read_optional(fields: _Fields, num_tokens: int) -> dict[str, Any]:
    record = fields.record
    optional: dict[str, Any] = {
        name: fields.floats(name, num_tokens) for name in PER_TOKEN if record.get(name) is not None
    }
    for name, types in SCALARS.items():
        if record.get(name) is not None:
            optional[name] = fields.scalar(name, *types)
    if record.get("loss_mask") is not None:
        optional["loss_mask"] = fields.booleans("loss_mask", num_tokens)
    if record.get("rewards") is not None:
        optional["rewards"] = fields.rewards()
    if record.get("reward") is not None:
        optional["reward"] = float(fields.scalar("reward", int, float))
    return optional


def _read_prompt(fields: _Fields) -> tuple[Prompt, int]:
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


class _Fields:
    """Typed access to one record; every method raises InputError naming the field."""

    def __init__(self, record: Mapping[str, Any], where: str) -> None:
        self.record = record
        self.where = where

    def scalar(self, name: str, *types: type) -> Any:
        value = self.record[name]
        # type() and not isinstance: JSON's true is an int to Python.
        if type(value) not in types or (type(value) is float and not math.isfinite(value)):
            expected = " or ".join(kind.__name__ for kind in types)
            raise InputError(f"{self.where}: {name}: expected {expected}, got {_shown(value)}")
        return value

    def prompt_ids(self) -> np.ndarray:
        ids = self.token_ids("prompt_token_ids")
        if not len(ids):
            raise InputError(f"{self.where}: prompt_token_ids is empty; a completion needs a token before it")
        return ids

    def token_ids(self, name: str) -> np.ndarray:
        def is_id(value: Any) -> bool:
            return type(value) is int and 0 <= value <= INT32_MAX

        return np.array(self._array(name, "token ids (integers >= 0)", is_id), np.int32)

    def floats(
        self, name: str, num_tokens: int | None = None, *, than: str = TOKEN_IDS, accepts_booleans: bool = False
    ) -> np.ndarray:
        """Of any number where `num_tokens` is None; `than` is the field that has as many as tokens."""
        numbers = (int, float, bool) if accepts_booleans else (int, float)

        def is_float32(value: Any) -> bool:
            return type(value) in numbers and abs(value) <= FLOAT32_MAX

        values = self._array(name, "finite float32 numbers", is_float32)
        if num_tokens is not None:
            allowed = (num_tokens, num_tokens + 1) if name == "values" else (num_tokens,)
            self._check_length(name, len(values), allowed, than)
        return np.array(values, np.float32)

    def booleans(self, name: str, num_tokens: int, *, than: str = TOKEN_IDS) -> np.ndarray:
        values = self._array(name, "booleans", lambda value: type(value) is bool)
        self._check_length(name, len(values), (num_tokens,), than)
        return np.array(values, bool)

    def length(self, name: str) -> int:
        return len(self._array(name, "entries, one per completion token", lambda value: True))

    def rewards(self) -> dict[str, float]:
        value = self.record["rewards"]
        if not isinstance(value, dict):
            raise InputError(f"{self.where}: rewards: expected an object, got {_shown(value)}")
        fields = _Fields(value, f"{self.where}: rewards")
        return {name: float(fields.scalar(name, int, float)) for name in value}

    def _array(self, name: str, expected: str, accepts: Callable[[Any], bool]) -> list[Any]:
        values = self.record[name]
        if not isinstance(values, list):
            raise InputError(f"{self.where}: {name}: expected a list of {expected}, got {_shown(values)}")
        for index, value in enumerate(values):
            if not accepts(value):
                raise InputError(f"{self.where}: {name}[{index}]: expected {expected}, got {_shown(value)}")
        return values

    def _check_length(self, name: str, length: int, allowed: tuple[int, ...], than: str) -> None:
        if length not in allowed:
            beside = "" if than == TOKEN_IDS else f", as {than} has {allowed[0]}"
            raise InputError(
                f"{self.where}: {name} has {length} entries, expected {' or '.join(map(str, allowed))}:"
                f" one per completion token{beside}"
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"
