"""The calling style of a plug-in, read from its signature, and the arguments of a call.

    batch     f(prompts, completions, completion_ids, <columns>, **kwargs) -> list of numbers or None    as in TRL
    verl      f(data_source, solution_str, ground_truth, extra_info=None)  -> number or dict with `score`
    by name   f(prompt, completion, answer, <columns>)                     -> number or dict with `score`
    estimator f(rewards, lengths, ..., prompts, <columns>, **kwargs)       -> list of numbers or lists of numbers

An estimator computes advantages (`app.advantage.custom_estimator`). A completion is the policy's text in its last turn.

Source: TRL's `GRPOTrainer.reward_funcs`; verl's `compute_score`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.plugins.loading import LoadError
from app.records.sample import Sample

StyleName = Literal["batch", "verl", "by name", "estimator"]

ANSWER_NAMES = ("answer", "ground_truth", "solution")
PROMPT_NAMES = ("question", "problem", "messages")
"""Names of answer and prompt columns in data sets; a function's parameters may use any of them."""

SAMPLE_ARGUMENTS: Mapping[StyleName, tuple[str, ...]] = {
    "batch": ("prompts", "completions", "completion_ids"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "by name": ("prompt", "completion", "completion_ids"),
    "estimator": ("rewards", "lengths", "group_ids", "policy_versions", "prompts", "completions", "completion_ids"),
}
"""Names of the arguments filled from a sample, in each style."""

MAX_CHARACTERS = 100_000
"""Functions get only the last characters of longer completions, about 25,000 tokens."""

TRAINER_ARGUMENTS = ("trainer_state", "log_metric", "log_extra")
"""Additional arguments of a batch-style function, as in TRL: the training progress, a function that logs a number, and
one that logs a value for each sample."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as described by `inspect.Parameter`."""

    name: str
    kind: str
    is_optional: bool


@dataclass(frozen=True, slots=True)
class DataColumns:
    """The data columns that can fill a parameter of a plug-in, in addition to the fields of a sample."""

    extra: frozenset[str]
    """Columns other than prompt and answer."""
    answers: frozenset[str]
    """Parameter names for the reference answer; empty if no row has one."""
    prompts: frozenset[str]
    """Further parameter names for the prompt, such as `question`."""
    source: str
    """Value of `data_source` if there is no such column."""
    without_token_ids: str | None = None
    """Location of a sample with only text, for which `completion_ids` cannot be filled."""

    @classmethod
    def from_rows(
        cls, rows: Iterable[Any], *, source: str, prompt_column: str | None = None, answer_column: str | None = None
    ) -> DataColumns:
        """Returns the columns found in at least one row; rows can be data-set rows or prompts."""
        rows = list(rows)
        has_answers = any(row.answer is not None for row in rows)
        return cls(
            extra=frozenset(name for row in rows for name in row.extra),
            answers=frozenset({*ANSWER_NAMES, answer_column or "answer"}) if has_answers else frozenset(),
            prompts=frozenset({*PROMPT_NAMES, prompt_column or "prompt"}),
            source=source,
        )

    def value(self, name: str, sample: Sample) -> Any:
        """Returns a sample's value of a column, or None if its row has no such column."""
        prompt = sample.prompt
        if name in prompt.extra or name in self.extra:
            return prompt.extra.get(name)
        if name in self.answers:
            return prompt.answer
        return prompt.source if name in self.prompts else None


@dataclass(frozen=True, slots=True)
class PlugInSignature:
    """The calling style of a function, and the names of the arguments to pass."""

    style: StyleName
    arguments: tuple[str, ...]

    @property
    def is_batch(self) -> bool:
        return self.style in ("batch", "estimator")

    @property
    def takes_all(self) -> bool:
        """Whether an estimator is called once with all samples of this host, rather than once per prompt."""
        return self.style == "estimator" and "group_ids" in self.arguments

    def to_text(self) -> str:
        """Returns a description for the startup log."""
        units = {"batch": "a batch", "verl": "one sample as in verl", "by name": "one sample"}
        units["estimator"] = "all samples of this host" if self.takes_all else "the samples of a prompt"
        return f"called with {units[self.style]}: {', '.join(self.arguments)}"


def read_signature(
    parameters: Sequence[Parameter], columns: DataColumns, *, is_estimator: bool = False
) -> PlugInSignature:
    """Returns the calling style of a function (or advantage estimator) and the names of the arguments to pass.

    Raises:
        LoadError: a required parameter cannot be filled, or no parameter depends on the sample.
    """
    named = [p for p in parameters if p.kind in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")]
    takes_everything = any(p.kind == "VAR_KEYWORD" for p in parameters)
    style = "estimator" if is_estimator else _style({p.name for p in named}, takes_everything)
    names = [*SAMPLE_ARGUMENTS[style], *sorted(columns.answers), *sorted(columns.extra), *sorted(columns.prompts)]
    if style == "batch":
        names += TRAINER_ARGUMENTS
    fillable = [x for x in dict.fromkeys(names) if x != "completion_ids" or columns.without_token_ids is None]
    wanted = [p.name for p in parameters if p.kind == "POSITIONAL_ONLY" and not p.is_optional]
    if wanted:
        raise LoadError(
            f"has parameters that cannot be passed by name: {_quote_names(wanted)}; remove the `/` from its signature"
        )
    unknown = [p.name for p in named if not p.is_optional and p.name not in fillable]
    arguments = [p.name for p in named if p.name in fillable]
    if takes_everything:
        again = columns.prompts - columns.extra - set(SAMPLE_ARGUMENTS[style])  # other names of the prompt
        arguments += [name for name in fillable if name not in arguments and name not in again]
    if unknown or not arguments:
        problem = "has no parameter that a sample can fill; add one"
        if unknown:
            problem = f"has parameters that cannot be filled: {_quote_names(unknown)}; remove or rename them"
        raise LoadError(f"{problem}. {_describe_available(columns, style)}")
    return PlugInSignature(style, tuple(arguments))


def _style(names: set[str], takes_everything: bool) -> StyleName:
    if names & {"prompts", "completions"} or ("completion_ids" in names and "completion" not in names):
        return "batch"
    if "solution_str" in names:
        return "verl"
    return "batch" if takes_everything and not names else "by name"


def _describe_available(columns: DataColumns, style: StyleName) -> str:
    data = _quote_names([*(["answer"] if columns.answers else []), *sorted(columns.extra)]) or "none"
    if style == "estimator":
        return f"An estimator takes {_quote_names(SAMPLE_ARGUMENTS[style])}, and these data columns: {data}"
    return (
        "A function takes a batch (prompts, completions, completion_ids), or one sample (prompt, completion, or verl's "
        f"data_source, solution_str, ground_truth, extra_info), and in either case these data columns: {data}"
        + (f"; {columns.without_token_ids} has no completion_token_ids" if columns.without_token_ids else "")
    )


def _quote_names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def build_arguments(signature: PlugInSignature, samples: Sequence[Sample], columns: DataColumns) -> dict[str, Any]:
    """Returns the keyword arguments of a call: lists in batch style, else the values of the single sample.

    Completions are shortened to their last `MAX_CHARACTERS`. `TRAINER_ARGUMENTS` are not included.
    """
    getters: dict[str, Callable[[Sample], Any]] = {
        "completion_ids": lambda s: s.last_turn_ids.tolist(),
        "prompt": lambda s: s.prompt.source,
        "prompts": lambda s: s.prompt.source,
        "completion": lambda s: s.completion[-MAX_CHARACTERS:],
        "completions": lambda s: _match_prompt_format(s, s.completion[-MAX_CHARACTERS:]),
        "solution_str": lambda s: s.completion[-MAX_CHARACTERS:],
    }
    if signature.style == "verl":
        getters |= {
            "data_source": lambda s: s.prompt.extra.get("data_source", columns.source),
            "ground_truth": lambda s: s.prompt.extra.get("ground_truth", s.prompt.answer),
            "extra_info": lambda s: s.prompt.extra.get("extra_info", {}),
        }
    if signature.style == "estimator":
        getters |= {
            "rewards": lambda s: s.reward,
            "lengths": lambda s: len(s.completion_ids),
            "group_ids": lambda s: s.group_id,
            "policy_versions": lambda s: s.policy_version,
        }
    arguments = {}
    for name in signature.arguments:
        if name in TRAINER_ARGUMENTS and name not in columns.extra:
            continue
        values = [getters[name](s) if name in getters else columns.value(name, s) for s in samples]
        arguments[name] = values if signature.is_batch else values[0]
    return arguments


def _match_prompt_format(sample: Sample, completion: str) -> str | list[dict[str, str]]:
    """Returns the completion as text if the prompt is text, and as a message if it is a chat, as TRL does."""
    return completion if isinstance(sample.prompt.source, str) else [{"role": "assistant", "content": completion}]
