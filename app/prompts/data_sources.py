"""Loads the training and evaluation data sets that the settings specify."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from app.prompts.arithmetic import make_problems
from app.prompts.curriculum import PassRateOrder
from app.prompts.dataset import Dataset, DatasetRow, load_dataset
from app.prompts.prompt_order import MixtureOrder, PromptOrder
from app.records.sample import Prompt
from settings.errors import InputError, join_words, renamed_in_errors
from settings.schema.data import DataSettings

log = logging.getLogger(__name__)

Row = TypeVar("Row")

ARITHMETIC = "builtin:arithmetic"
HELD_OUT_SEED = 0
"""Seed of the evaluation problems, which are the same in every run."""


def load_training_data(data: DataSettings, *, seed: int, reads_completions: bool = False) -> Dataset:
    """Loads the rows of `data.source`; `seed` selects the arithmetic problems.

    In a mixture, each uid starts with `<index of the source>/`, and the column `data_source` names the source. With
    `reads_completions`, answers are completions for supervised fine-tuning.

    Raises:
        InputError: the data set cannot be used (see `load_dataset` and `make_problems`).
    """
    options = {"num_problems": data.num_problems, "seed": seed, "reads_completions": reads_completions}
    parts = [_load(data, one.source, split=one.split or data.split, **options) for one in data.sources]
    if isinstance(data.source, str):
        return parts[0]
    rows = [row for i, part in enumerate(parts) for row in _with_data_source(part, uid_prefix=f"{i}/")]
    return Dataset(rows=rows, column_mapping={}, source=", ".join(part.source for part in parts), parts=parts)


def _with_data_source(dataset: Dataset, *, uid_prefix: str = "") -> list[DatasetRow]:
    """Adds a column `data_source` to rows without one (verl's data sets have it), and a prefix to their uids."""
    return [
        replace(row, uid=uid_prefix + row.uid, extra={"data_source": dataset.source, **row.extra})
        for row in dataset.rows
    ]


def make_prompt_order(
    data: DataSettings, prompts: Sequence[Prompt], *, seed: int
) -> PromptOrder | MixtureOrder | PassRateOrder:
    """Returns the order in which training uses the prompts of `load_training_data`."""
    rows, weights = [np.arange(len(prompts))], [one.weight for one in data.sources]
    if not isinstance(data.source, str):
        sources = np.asarray([int(prompt.uid.partition("/")[0]) for prompt in prompts])
        rows = [np.flatnonzero(sources == i) for i in range(len(data.source))]
    if data.curriculum == "pass_rate":
        return PassRateOrder(seed, [prompt.uid for prompt in prompts], rows, weights)
    if isinstance(data.source, str):
        return PromptOrder(seed, len(prompts), data.shuffle)
    return MixtureOrder(seed, rows, weights, data.shuffle)


def load_held_out_data(data: DataSettings, *, num_prompts: int | None) -> Dataset:
    """Loads the evaluation rows, always the same ones, evenly spaced in the data set.

    Args:
        num_prompts: maximum number of rows; None for all rows (`data.num_problems` of builtin:arithmetic).

    Raises:
        InputError: the data set cannot be used, or the training data is a file or a mixture and no evaluation data is
            set.
    """
    source, split = data.eval_source or data.source, data.eval_split or "test"
    if not isinstance(source, str) or (data.eval_source is None and not data.has_splits):
        files = join_words((one.source for one in data.sources), last="and")
        raise InputError(
            f"data.eval_source is not set, and training uses all of data.source = {files}; set data.eval_source to "
            "held-out data, or eval.every_steps to 0 to train without evaluations"
        )
    num_problems = num_prompts or data.num_problems
    setting = "data.source" if data.eval_source is None else "data.eval_source"
    with renamed_in_errors("data.source", to=setting), renamed_in_errors("data.split", to="data.eval_split"):
        dataset = _load(data, source, split=split, num_problems=num_problems, seed=HELD_OUT_SEED)
    if not isinstance(data.source, str):
        dataset = replace(dataset, rows=_with_data_source(dataset))
    return dataset if num_prompts is None else replace(dataset, rows=evenly_spaced(dataset.rows, num_prompts))


def evenly_spaced(rows: Sequence[Row], max_rows: int) -> Sequence[Row]:
    """Returns at most `max_rows` evenly spaced rows."""
    return rows if len(rows) <= max_rows else [rows[i * len(rows) // max_rows] for i in range(max_rows)]


def _load(
    data: DataSettings, source: str, *, split: str, num_problems: int, seed: int, reads_completions: bool = False
) -> Dataset:
    log.info("reading %s", source)
    if source == ARITHMETIC:
        return make_problems(
            difficulty=data.difficulty, operators=data.operators, num_problems=num_problems, split=split, seed=seed
        )
    if source.startswith("builtin:"):
        raise InputError(f"data.source: there is no {source!r}; the only built-in data set is {ARITHMETIC}")
    columns = {"prompt_column": data.prompt_column, "answer_column": data.answer_column}
    return load_dataset(source, split=split, **columns, reads_completions=reads_completions)
