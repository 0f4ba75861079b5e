"""Settings of the section `data`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from settings.schema.section import Section


class DataSettings(Section):
    source: str = Field(
        default="builtin:arithmetic",
        min_length=1,
        description="`builtin:arithmetic`, `hf:<hub id>[:<config>]`, or a .jsonl / .parquet file.",
    )
    split: str = Field(default="train", description="Split of a hub data set or of the generator.")
    revision: str | None = Field(default=None, description="Commit of a hub data set; its newest when null.")
    eval_source: str | None = Field(
        default=None,
        description="Where evaluation prompts come from. Derived when null: `data.source`; required beside a file.",
    )
    eval_split: str | None = Field(default=None, description="`test` when null; not used for a file.")
    prompt_column: str | None = Field(
        default=None, description="Found among prompt, question, problem, messages when null."
    )
    answer_column: str | None = Field(default=None, description="Found among answer, ground_truth, solution when null.")
    system_prompt: str | None = Field(default=None, description="System message put before every prompt.")
    max_prompt_length: int = Field(default=128, ge=1, description="Tokens, chat template included.")
    overlong_prompts: Literal["drop", "error", "truncate_left"] = Field(
        default="drop", description="What happens to longer prompts. Counted and reported either way."
    )
    shuffle: bool = Field(default=True, description="A new order every epoch, decided by `run.seed`.")
    difficulty: Annotated[tuple[Annotated[int, Field(ge=1, le=6)], ...], Field(min_length=1, strict=False)] = Field(
        default=(1, 2),
        description="Levels of the arithmetic generator: level n asks for numbers of up to n digits.",
    )
    operators: Annotated[tuple[Literal["+", "-", "*"], ...], Field(min_length=1, strict=False)] = Field(
        default=("+",), description="Operators of the arithmetic generator."
    )
    num_problems: int = Field(
        default=20_000,
        ge=1,
        le=1_000_000,
        description="Rows the arithmetic generator makes for training (fewer where fewer exist).",
    )
