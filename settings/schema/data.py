"""Settings of the section `data`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, JsonValue, Tag

from settings.schema.section import LocalPath, Section

SINGLE_TAG, MIXTURE_TAG = "(single)", "(mixture)"
"""Tags in the location of a pydantic error, which are not part of a setting's name."""


class DataSourceSettings(Section):
    """One source of prompts in a mixture, and its weight."""

    source: LocalPath = Field(min_length=1)
    """One source of the mixture, in any of the forms of `data.source` except a list."""
    weight: float = Field(default=1.0, gt=0)
    """Weight of this source: its share of the prompts is this weight divided by the sum of all weights."""
    split: str | None = None
    """Split of this source. If null, `data.split` is used."""


def _validate_distinct_sources(value: tuple[DataSourceSettings, ...]) -> tuple[DataSourceSettings, ...]:
    names = [(one.source, one.split) for one in value]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(
            f"expected different sources, but {repeated[0]} occurs more than once; list it once, with "
            "the sum of the weights"
        )
    return value


Mixture = Annotated[
    tuple[
        Annotated[DataSourceSettings, BeforeValidator(lambda one: {"source": one} if isinstance(one, str) else one)],
        ...,
    ],
    Field(min_length=1, strict=False),
    AfterValidator(_validate_distinct_sources),
]


def _kind_of_source(value: Any) -> str:
    return MIXTURE_TAG if isinstance(value, list | tuple) else SINGLE_TAG


class DataSettings(Section):
    source: Annotated[
        Annotated[LocalPath, Field(min_length=1), Tag(SINGLE_TAG)] | Annotated[Mixture, Tag(MIXTURE_TAG)],
        Discriminator(_kind_of_source),
    ] = "builtin:arithmetic"
    """Training prompts: `builtin:arithmetic`, `hf:<hub id>[:<config>][@<commit>]`, a .jsonl, .jsonl.gz or .parquet
    file, a folder of such files, or a pattern such as `data/train-*.parquet`. A list of these, such as `[{source:
    a.jsonl, weight: 3}, b.jsonl]`, is a mixture; reward functions then get the source of a prompt in the column
    data_source."""
    split: str = "train"
    """Split to train on, for a hub data set or the arithmetic generator."""
    eval_source: LocalPath | None = None
    """Evaluation prompts, in one of the forms of `data.source` except a list. If null, `data.source` is used if it is
    built in or on the hub; if it is a file or a mixture, evaluation needs this setting."""
    eval_split: str | None = None
    """Split to evaluate on, for a hub data set or the arithmetic generator. If null, it is `test`."""
    prompt_column: str | None = None
    """Column of the prompts. If null, it is the first of prompt, question, problem and messages that exists."""
    answer_column: str | None = None
    """Column of the reference answers, which may have any type. If null, it is the first of answer, ground_truth,
    solution and reward_model.ground_truth that exists. With `algorithm.name: sft`, it is the column of the completions
    to learn, which are text or chat messages (a whole conversation if the first one is not by the assistant); if null,
    it is the first of completion, response, messages, answer, extra_info.answer and solution that exists."""
    system_prompt: str | None = None
    """System message that is added before every prompt. If null, none is added."""
    chat_template: Literal["model", "none"] = "model"
    """`model` renders every prompt with the model's chat template; a text prompt becomes one user message. `none`
    encodes text as it is, for base models and prompts that are already rendered: names of control tokens, such as
    `<|im_start|>`, become these tokens, and the tokenizer's BOS token is prepended. A reward model then also reads
    prompt and completion as one text."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default={})
    """Variables for the model's chat template, such as `{enable_thinking: false}` for Qwen3. The chat template of a
    reward model does not get them."""
    max_prompt_length: int = Field(default=128, ge=1)
    """Maximum length of a prompt in tokens, including those that the chat template adds; `data.overlong_prompts` says
    what happens to longer ones. The default is 512 for models that are not built in."""
    overlong_prompts: Literal["drop", "error", "truncate_left"] = "drop"
    """What to do with prompts longer than `data.max_prompt_length`: leave them out (drop), stop the run (error), or
    keep only their last tokens (truncate_left). With `algorithm.name: sft`, error also stops the run for completions
    longer than `rollout.max_new_tokens`, and the other values leave them out."""
    shuffle: bool = True
    """Whether every epoch has a new random order of prompts, determined by `run.seed`."""
    curriculum: Literal["none", "pass_rate"] = "none"
    """`pass_rate` samples a prompt more often if the policy solves it sometimes than if it solves it always or never.
    `none` uses each prompt once per epoch."""
    difficulty: Annotated[tuple[Annotated[int, Field(ge=1, le=3)], ...], Field(min_length=1, strict=False)] = (1, 2)
    """Levels of the problems of the arithmetic generator, from 1 to 3; a problem of level n has numbers of up to n
    digits."""
    operators: Annotated[tuple[Literal["+", "-", "*"], ...], Field(min_length=1, strict=False)] = ("+",)
    """Operators that the arithmetic generator uses in its problems."""
    num_problems: int = Field(default=20_000, ge=1, le=1_000_000)
    """Number of training problems of the arithmetic generator. There are fewer if `data.difficulty` and
    `data.operators` do not allow as many different ones."""

    @property
    def has_splits(self) -> bool:
        """Whether there is a single source with splits, which means that it is built in or on the hub."""
        return isinstance(self.source, str) and self.source.startswith(("builtin:", "hf:"))

    @property
    def sources(self) -> tuple[DataSourceSettings, ...]:
        """All sources of training prompts; a single source has weight 1."""
        if isinstance(self.source, str):
            return (DataSourceSettings(source=self.source),)
        return self.source
