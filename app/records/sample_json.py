"""Samples as JSON objects, in the one format that every command writes and reads.

Every float32 is written as the float64 of the same value, so it comes back bit for bit.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
from jaxtyping import Bool, UInt8
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from app.records.jsonl import read_jsonl
from app.records.sample import EPISODE_ENDS, Episode, Prompt, Sample
from app.records.shared_rows import SharedRows
from settings.errors import InputError, join_words

EPISODE = TypeAdapter(Episode)
FLOAT32_MAX = float(np.finfo(np.float32).max)
Float32 = Annotated[float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX)]
INT32_MAX = 2**31 - 1
NonNegative = Annotated[int, Field(ge=0, le=INT32_MAX)]
Bit = Annotated[int, Field(ge=0, le=1)]
# A field's description is what an error message says it expects; for a list, what it expects of the entries.
Text = Annotated[str, Field(description="a string")]
Integer = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX, description="a 32-bit integer")]
TokenIds = Annotated[list[NonNegative], Field(description="token ids (integers >= 0)")]
Floats = Annotated[list[Float32] | None, Field(description="finite float32 numbers")]


class RoutesRecord(BaseModel):
    """The recorded experts of a sample's tokens; see `Sample.routes`."""

    model_config = ConfigDict(strict=True)

    num_layers: NonNegative
    experts_per_token: NonNegative
    ids: str
    """One byte per token of prompt and completion, layer and active expert, in Base64; see `Sample.routes`."""


class SampleRecord(BaseModel):
    """The fields of a sample's JSON object. A command validates only the fields that it reads; None = absent."""

    model_config = ConfigDict(strict=True)

    uid: Text = ""
    group_id: Annotated[int, Field(ge=-(2**63), lt=2**63, description="a 64-bit integer")] = 0
    sample_index: Integer = 0
    prompt: Annotated[str | list[Any], Field(description="text or chat messages")] = ""
    completion: Text = ""
    prompt_token_ids: TokenIds = []
    completion_token_ids: TokenIds = []
    behavior_logprobs: Annotated[list[Float32], Field(description="finite float32 numbers")] = []
    finish_reason: Text = "stop"
    policy_version: Integer = 0
    policy_versions: Annotated[list[NonNegative] | None, Field(description="versions (integers >= 0)")] = None
    worker: Text = "0"
    segments: Integer = 1
    elapsed_s: Annotated[float, Field(description="a number")] = 0.0
    answer: Any = None
    columns: Any = None
    row_of: Text | None = None
    """The uid of the record that has the fields of the row; `app.records.shared_rows` restores them when reading."""
    loss_mask: Annotated[list[bool | Bit] | None, Field(description="booleans, or 0 and 1")] = None
    reward: Annotated[Float32 | bool | None, Field(description="a finite float32 number")] = None
    rewards: Annotated[dict[str, float] | None, Field(description="an object of numbers")] = None
    token_rewards: Annotated[list[Float32 | bool] | None, Field(description="finite float32 numbers")] = None
    kept_mass_logs: Floats = None
    routes: Annotated[
        RoutesRecord | None, Field(description="an object of num_layers, experts_per_token and ids in Base64")
    ] = None
    episode: Any = None
    """The fields of `app.records.sample.Episode`."""
    policy_logprobs: Floats = None
    reference_logprobs: Floats = None
    values: Floats = None
    advantages: Floats = None
    returns: Floats = None


REQUIRED_FIELDS = (
    *("uid", "group_id", "sample_index", "prompt", "completion", "prompt_token_ids", "completion_token_ids"),
    *("behavior_logprobs", "finish_reason", "policy_version"),
)
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
DTYPES = {"loss_mask": np.bool_, "policy_versions": np.int32}
"""Dtypes of the fields with one value per completion token that are not float32."""
UNCHANGED_FIELDS = (
    *("sample_index", "group_id", "completion", "finish_reason", "policy_version"),
    *("worker", "segments", "elapsed_s", "rewards"),
)
"""Fields that a `Sample` and its JSON object have with the same name and value."""
TOKEN_IDS = "completion_token_ids"
CONVERSATION = "messages"
"""Field with the whole chat of a sample with an episode; only for other programs, since `episode` has all of it."""
LOGPROB_FIELDS = ("behavior_logprobs", "policy_logprobs", "reference_logprobs")
SCORING_FIELDS = (
    *("uid", "sample_index", "prompt_token_ids", TOKEN_IDS, "loss_mask", "finish_reason"),
    *(*LOGPROB_FIELDS, "routes"),
)
REWARD_FIELDS = ("uid", "sample_index", "answer", "columns", "finish_reason")
"""Fields that every reward may read, besides texts and token ids."""
MAX_LOGPROB = 1e-3
"""Maximum accepted logprob. It is above 0, because log_softmax may round log p of a nearly certain token up."""
ADVANTAGE_FIELDS = (TOKEN_IDS, "token_rewards", "loss_mask", "values", "reward", "finish_reason")


class LocatedSample(NamedTuple):
    """The sample that a command reads from a JSON object, with the original object and its location in the file."""

    where: str
    record: Mapping[str, Any]
    sample: Sample


def sample_to_record(sample: Sample) -> dict[str, Any]:
    """Returns the sample as a JSON object; fields of stages that have not run are absent.

    `policy_version` is the version of the oldest token; `policy_versions`, one per token, is present only if several
    versions sampled them. `columns` holds the other columns of the data set's row, which `share_rows` leaves out of all
    but one sample of a file. `messages`, the whole conversation, accompanies `episode`. Unknown fields of the file that
    the sample came from follow at the end, unchanged.
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
    for name in ("loss_mask", *PER_TOKEN_FIELDS, "policy_versions"):
        if (array := getattr(sample, name)) is not None:
            record[name] = array.tolist()
    if sample.routes is not None:
        _, layers, experts = sample.routes.shape
        ids = base64.b64encode(sample.routes.tobytes()).decode()
        record["routes"] = {"num_layers": layers, "experts_per_token": experts, "ids": ids}
    if sample.episode is not None:
        record["episode"] = EPISODE.dump_python(sample.episode, mode="json")
        record[CONVERSATION] = sample.conversation
    if sample.rewards is not None:
        record["rewards"] = dict(sample.rewards)
    if sample.reward is not None:
        record["reward"] = sample.reward
    if prompt.extra:
        record["columns"] = prompt.extra
    assert not record.keys() & sample.extra.keys(), "Sample.extra holds a known field"
    return record | dict(sample.extra)


def read_samples(path: str | Path, *, ignored_fields: Container[str] = ()) -> Iterator[tuple[str, Sample]]:
    """Yields (`FILE:LINE`, sample) for every line of a sample file; unknown fields go to `Sample.extra`.

    Ignored fields are dropped before they are parsed.

    Raises:
        InputError: see `read_jsonl` and `sample_from_record`.
    """
    rows = SharedRows()
    for line, record in read_jsonl(path):
        where = f"{path}:{line}"
        whole = rows.restore(record, where=where)
        kept = {name: value for name, value in whole.items() if name not in ignored_fields}
        yield where, sample_from_record(kept, where=where)


def sample_from_record(record: Mapping[str, Any], *, where: str) -> Sample:
    """Returns the sample in a JSON object; unknown fields go to `Sample.extra`.

    `where` starts every error message, for example `rollouts.jsonl:12`.

    Raises:
        InputError: a required field is absent, or a field has the wrong type, length or range.
    """
    known = SampleRecord.model_fields
    fields = _validate_fields(record, where=where)
    num_tokens = len(fields.completion_token_ids)
    arrays = ("behavior_logprobs", *PER_TOKEN_FIELDS, "policy_versions")
    optional = _per_token_arrays(fields, arrays, num_tokens, where=where)
    if fields.routes is not None:
        optional["routes"] = _decode_routes(fields.routes, len(fields.prompt_token_ids) + num_tokens, where=where)
    if not fields.prompt_token_ids:
        raise InputError(f"{where}: prompt_token_ids is empty; a completion needs a token before it; remove the line")
    if fields.episode is not None:
        optional["episode"] = _read_episode(fields.episode, optional.get("loss_mask"), num_tokens, where=where)
    suffix = f"/s{fields.sample_index}"
    if not fields.uid.endswith(suffix) or fields.uid == suffix:
        raise InputError(f"{where}: uid: expected `<prompt uid>{suffix}`, as sample_index says, got {fields.uid!r}")
    derived = {CONVERSATION} if fields.episode is not None else set[str]()
    unknown = {name: value for name, value in record.items() if name not in known and name not in derived}
    if "columns" in record and not isinstance(fields.columns, dict):
        unknown["columns"] = fields.columns
    return Sample(
        prompt=Prompt(
            uid=fields.uid.removesuffix(suffix),
            token_ids=np.array(fields.prompt_token_ids, np.int32),
            source=fields.prompt,
            answer=fields.answer,
            extra=fields.columns if isinstance(fields.columns, dict) else {},
        ),
        completion_ids=np.array(fields.completion_token_ids, np.int32),
        reward=None if fields.reward is None else float(fields.reward),
        extra=unknown,
        **{name: getattr(fields, name) for name in UNCHANGED_FIELDS},
        **optional,
    )


def sample_for_scoring(
    record: Mapping[str, Any], *, where: str, index: int, names: Collection[str] = SCORING_FIELDS
) -> Sample:
    """Returns a sample for scoring from a JSON object, which may lack all fields that only a rollout adds.

    A sample without a rollout's `uid` is named by its position in the file, and is its own group. Absent fields (null
    counts as absent) have the defaults of `SampleRecord`.

    Args:
        index: the index of the object in its file.
        names: the fields of `SampleRecord` to read; its other fields, which may have other meanings in other programs,
            are ignored. Unknown fields go to `Sample.extra`.

    Raises:
        InputError: a field that is read has the wrong type, length or range.
    """
    known = SampleRecord.model_fields
    given = {name: x for name, x in record.items() if name not in known or (name in names and x is not None)}
    if not str(given.get("uid")).endswith(f"/s{given.get('sample_index')}"):
        given |= {"uid": f"{where}/s0", "sample_index": 0}
    ids = given.get(TOKEN_IDS)
    # Rewards need no token ids, but a prompt has at least one.
    absent = {name: known[name].default for name in REQUIRED_FIELDS} | {
        "group_id": index,
        "prompt_token_ids": [0],
        "behavior_logprobs": [0.0] * len(ids) if isinstance(ids, list) else [],
    }
    sample = sample_from_record({**absent, **given}, where=where)
    for name in LOGPROB_FIELDS:
        logprobs = getattr(sample, name)
        if logprobs is not None and len(above := np.flatnonzero(logprobs > MAX_LOGPROB)):
            raise InputError(
                f"{where}: {name}[{above[0]}] is {logprobs[above[0]]:.6g}, but a logprob is at most 0; correct the "
                "field, which must contain natural logarithms of probabilities, or remove it"
            )
    return sample


def sample_for_advantages(
    record: Mapping[str, Any], *, where: str, bootstrap_truncated: bool, needs_logprobs: bool, needs_turns: bool
) -> Sample:
    """Returns a sample with only the fields that advantage estimation reads from a JSON object.

    Its `finish_reason` is `length` if it is bootstrapped by the value after its last token, else `stop`. If
    `finish_reason` is absent, it is bootstrapped if this value is present.

    Args:
        bootstrap_truncated: whether samples with `finish_reason: length` are bootstrapped.
        needs_logprobs: whether to read `policy_logprobs` and `reference_logprobs`, for the KL penalty.
        needs_turns: whether to read `episode` if it is present, for the discount of turns.

    Raises:
        InputError: a field that is read is absent, or has the wrong type, length or range.
    """
    logprobs = ("policy_logprobs", "reference_logprobs") if needs_logprobs else ()
    names = {*ADVANTAGE_FIELDS, *logprobs, *(("episode",) if needs_turns else ())}
    given = {name: x for name, x in record.items() if name in names and x is not None}
    if "values" not in given:
        raise InputError(
            f"{where}: the field `values` is missing (one number per completion token); add it with `grpo score "
            "--role critic`"
        )
    for name in logprobs:
        if name not in given:
            raise InputError(
                f"{where}: the field `{name}` is missing, which the KL penalty in the reward needs; add it with "
                f"`grpo score --role {name.removesuffix('_logprobs')}`, or turn the penalty off with algorithm.beta: 0"
            )
    # Any list with an entry per token tells the number of tokens; their ids do not matter.
    per_token = next(given[name] for name in (TOKEN_IDS, "token_rewards", "loss_mask", "values") if name in given)
    ids = {TOKEN_IDS: [0] * len(per_token)} if isinstance(per_token, list) else {}
    sample = sample_for_scoring({**ids, **given}, where=where, index=0, names=names)
    num_tokens = len(sample.completion_ids)
    continues = len(sample.values if sample.values is not None else ()) > num_tokens
    if "finish_reason" in given:
        was_truncated = sample.finish_reason == "length" and bootstrap_truncated
        if was_truncated and not continues:
            raise InputError(
                f"{where}: values has length {num_tokens}, expected {num_tokens + 1}: the sample was truncated "
                "(`length`) and needs the value after its last token; add it with `grpo score --role critic`, or set "
                "algorithm.bootstrap_truncated: false"
            )
        continues = was_truncated
    if sample.token_rewards is None and sample.reward is None and sample.mask.any():
        raise InputError(
            f"{where}: the fields `reward` and `token_rewards` (one number per completion token) are missing; "
            "add `reward` with `grpo score --role reward`"
        )
    return replace(sample, reward=sample.reward or 0.0, finish_reason="length" if continues else "stop")


def _validate_fields(record: Mapping[str, Any], *, where: str) -> SampleRecord:
    missing = [name for name in REQUIRED_FIELDS if name not in record]
    if missing:
        raise InputError(
            f"{where}: missing {join_words(missing, last='and')}; give a file written by grpo rollout, or add what a "
            f"sample needs: {join_words(REQUIRED_FIELDS, last='and')}"
        )
    present = {name: x for name, x in record.items() if x is not None or name in REQUIRED_FIELDS}
    try:
        return SampleRecord.model_validate(present)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
    location, value = "", cast("Any", record)
    for part in problem["loc"]:
        # Pydantic appends the name of a union's member to the path of the value.
        if isinstance(value, list) and isinstance(part, int):
            location, value = f"{location}[{part}]", value[part]
        elif isinstance(value, Mapping) and part in value:
            location, value = f"{location}.{part}" if location else str(part), value[part]
    expected = SampleRecord.model_fields[str(problem["loc"][0])].description
    if problem["type"] == "list_type":
        expected = f"a list of {expected}"
    elif location.startswith("rewards."):
        expected = "a number"
    text = "null or NaN" if value is None else repr(value)
    got = f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"
    raise InputError(f"{where}: {location}: expected {expected}, got {got}")


def _per_token_arrays(fields: SampleRecord, names: Iterable[str], num_tokens: int, *, where: str) -> dict[str, Any]:
    """Returns the arrays of `names` and of `loss_mask` that are present, each with its length checked."""
    arrays: dict[str, Any] = {}
    for name in (*names, "loss_mask"):
        if (entries := getattr(fields, name)) is not None:
            allowed = (num_tokens, num_tokens + 1) if name == "values" else (num_tokens,)
            if len(entries) not in allowed:
                more = ", and optionally one after the last" if name == "values" else ""
                raise InputError(
                    f"{where}: {name} has length {len(entries)}, expected {join_words(allowed)}: one entry per "
                    f"completion token{more}"
                )
            arrays[name] = np.array(entries, DTYPES.get(name, np.float32))
    return arrays


def _decode_routes(record: RoutesRecord, num_tokens: int, *, where: str) -> UInt8[np.ndarray, "S+C L k"]:
    shape = num_tokens, record.num_layers, record.experts_per_token
    try:
        ids = np.frombuffer(base64.b64decode(record.ids, validate=True), np.uint8)
    except ValueError as error:
        raise InputError(
            f"{where}: routes.ids: expected Base64, got {record.ids!r:.40} ({error}); correct or remove `routes`"
        ) from None
    if len(ids) != math.prod(shape):
        raise InputError(
            f"{where}: routes.ids has {len(ids)} bytes, expected {math.prod(shape)}: one for each of {num_tokens} "
            f"tokens of prompt and completion, {record.num_layers} layers and {record.experts_per_token} experts; "
            "correct or remove the field `routes`"
        )
    return ids.reshape(shape)


def _read_episode(record: Any, mask: Bool[np.ndarray, "C"] | None, num_tokens: int, *, where: str) -> Episode:
    """Returns the episode of a sample; `mask` is the sample's `loss_mask`.

    Raises:
        InputError: a field has the wrong type or range, turns are out of order or outside the completion, or
            `loss_mask` is True on a token between turns.
    """
    try:
        episode = EPISODE.validate_python(record)
    except ValidationError as error:
        [problem, *_] = error.errors(include_url=False)
        place = ".".join(map(str, ("episode", *problem["loc"])))
        expected = problem["msg"].replace("Input should be", "expected")
        raise InputError(f"{where}: {place}: {expected}, got {problem['input']!r:.40}") from None
    if episode.end not in EPISODE_ENDS:
        raise InputError(f"{where}: episode.end: expected {join_words(EPISODE_ENDS)}, got {episode.end!r:.40}")
    place = 0
    for number, turn in enumerate(episode.turns):
        if not place <= turn.start <= turn.end <= num_tokens:
            raise InputError(
                f"{where}: episode.turns.{number} is from {turn.start} to {turn.end}; turns must be in order: "
                f"expected {place} <= start <= end <= {num_tokens}, the number of completion_token_ids"
            )
        place = turn.end
    mask = np.ones(num_tokens, bool) if mask is None else mask
    if len(wrong := np.flatnonzero(mask & ~episode.written_mask(num_tokens))):
        raise InputError(
            f"{where}: loss_mask[{wrong[0]}] is true, but this token is in no policy turn (episode.turns); it must "
            "be false for tokens of observations"
        )
    return episode
