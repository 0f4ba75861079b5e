"""Loads the training and evaluation data sets that the settings specify."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from app.prompts.arithmetic import make_problems
from app.prompts.dataset import Dataset, DatasetRow, load_dataset
from settings.errors import InputError
from settings.schema.data import DataSettings

log = logging.getLogger(__name__)

ARITHMETIC = "builtin:arithmetic"
HELD_OUT_SEED = 0
"""Seed of the evaluation problems, which are the same in every run."""


def load_training_data(data: DataSettings, *, seed: int) -> Dataset:
    """Loads the rows of `data.source`; `seed` selects the arithmetic problems.

    Raises:
        InputError: the data set cannot be used (see `load_dataset` and `make_problems`).
    """
    return _load(data, data.source, split=data.split, num_problems=data.num_problems, seed=seed)


def load_held_out_data(data: DataSettings, *, num_prompts: int | None) -> Dataset:
    """Loads the evaluation rows: always the same ones, evenly spaced in the data set.

    Args:
        num_prompts: maximum number of rows; None for all rows (`data.num_problems` of builtin:arithmetic).

    Raises:
        InputError: the data set cannot be used, or the training data is a file and no evaluation data is set.
    """
    source, split = data.eval_source or data.source, data.eval_split or "test"
    if data.eval_source is None and source != ARITHMETIC and not source.startswith("hf:"):
        raise InputError(
            f"data.eval_source is not set, and training reads the whole file data.source = {source}; set"
            " data.eval_source to a file of held-out data, or eval.every_steps to 0"
        )
    dataset = _load(data, source, split=split, num_problems=num_prompts or data.num_problems, seed=HELD_OUT_SEED)
    return dataset if num_prompts is None else replace(dataset, rows=evenly_spaced(dataset.rows, num_prompts))


def evenly_spaced(rows: Sequence[DatasetRow], max_rows: int) -> Sequence[DatasetRow]:
    """Returns at most `max_rows` rows at even distances."""
    return rows if len(rows) <= max_rows else [rows[i * len(rows) // max_rows] for i in range(max_rows)]


def _load(data: DataSettings, source: str, *, split: str, num_problems: int, seed: int) -> Dataset:
    log.info("reading %s", source)
    if source == ARITHMETIC:
        return make_problems(
            difficulty=data.difficulty,
            operators=data.operators,
            num_problems=num_problems,
            split=split,
            seed=seed,
        )
    if source.startswith("builtin:"):
        raise InputError(f"data.source: there is no {source!r}; the only built-in data set is {ARITHMETIC}")
    return load_dataset(
        source,
        split=split,
        revision=data.revision if source == data.source else None,
        prompt_column=data.prompt_column,
        answer_column=data.answer_column,
    )
