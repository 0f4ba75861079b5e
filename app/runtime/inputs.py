"""Reads and checks the models, prompts and rewards that the settings specify."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from app.advantage.custom_estimator import SETTING as ESTIMATOR_SETTING
from app.advantage.custom_estimator import CustomEstimator
from app.plugins.worker_process import allow_variables
from app.prompts.completions import CompletionEncoder, encode_completions
from app.prompts.data_sources import evenly_spaced, load_held_out_data, load_training_data
from app.prompts.dataset import Dataset, DatasetRow
from app.prompts.encode import EncodeReport, encode_prompts, misread_prompts
from app.prompts.tokenizer import Tokenizer
from app.records.sample import Prompt, Sample
from app.records.text_format import format_percent
from app.reward.builtin_tasks import check_answers
from app.reward.function_pool import open_pool
from app.reward.plugin import PlugIn
from app.reward.plugin_signature import DataColumns
from app.reward.reward_functions import EnvironmentReward, OverlongPenalty, RewardFunctions, accuracy_function_name
from app.runtime.model_spec import (
    ModelSpec,
    NetworkSpec,
    check_context_length,
    read_critic_spec,
    read_model_spec,
    read_reference_spec,
)
from app.runtime.reward_model import RewardModelSpec, read_reward_model_spec
from app.runtime.reward_trial import make_trial_samples
from settings import Settings
from settings.errors import InputError

log = logging.getLogger(__name__)

NUM_PROMPTS_LOOKED_AT = 1000
MAX_UNKNOWN_SHARE = 0.1
"""Fraction of unknown tokens from which a warning is logged; text in the tokenizer's language has almost none."""
PromptsOrRows = Sequence[Prompt] | Sequence[DatasetRow]
"""Tokenized prompts, or the data set rows from which they are made."""


def make_rewards(
    settings: Settings, columns: DataColumns, held_out_columns: DataColumns | None = None
) -> RewardFunctions:
    """Returns the reward functions that `reward.*` and `env.*` specify, without importing plug-ins yet.

    Args:
        columns: columns of the training data that plug-ins can use.
        held_out_columns: columns of the evaluation data; None if no held-out samples are graded.
    """
    reward, env = settings.reward, settings.env
    overlong = environment = None
    if reward.overlong_buffer is not None:
        overlong = OverlongPenalty(settings.rollout.max_new_tokens, reward.overlong_buffer, reward.overlong_penalty)
    if env.source is not None:
        environment = EnvironmentReward(weight=env.weight, rewards_turns=env.credit == "turn")
    return RewardFunctions(reward, settings.plugins, columns, held_out_columns, overlong, environment)


def open_custom_estimator(
    settings: Settings, prompts: Sequence[Prompt], tokenizer: Tokenizer, stack: ExitStack
) -> CustomEstimator | None:
    """Returns the plug-in of `algorithm.estimator`, tried on the samples of one prompt; None without one.

    Args:
        stack: closing this stack ends the processes of the plug-in.

    Raises:
        InputError: the function cannot be used.
    """
    name = settings.algorithm.estimator
    if name is None or not settings.algorithm.has_custom_estimator:
        return None
    allow_variables(settings.plugins.env_vars)
    pool = open_pool(name, settings.plugins, stack, name=ESTIMATOR_SETTING, setting=ESTIMATOR_SETTING)
    plug_in = PlugIn(ESTIMATOR_SETTING, pool, data_columns(settings, prompts), batch_size=1, is_estimator=True)
    custom = CustomEstimator(plug_in, on_error=settings.reward.on_error)
    custom.try_on(make_trial_samples(tokenizer, prompts))
    return custom


def data_columns(settings: Settings, rows: PromptsOrRows) -> DataColumns:
    """Returns the columns of the training data that plug-ins can use."""
    data = settings.data
    return DataColumns.from_rows(
        rows, source=data.sources[0].source, prompt_column=data.prompt_column, answer_column=data.answer_column
    )


def eval_columns(settings: Settings, rows: PromptsOrRows) -> DataColumns:
    """Returns the columns of the evaluation data that plug-ins can use."""
    return replace(data_columns(settings, rows), source=settings.data.eval_source or settings.data.sources[0].source)


def read_policy(settings: Settings, *, config_only: bool = False) -> ModelSpec:
    """Reads the model of `model.path` and its tokenizer or, with `config_only`, only its `config.json`.

    Raises:
        InputError: the model cannot be used, or its context is too short for the settings.
    """
    model = read_model_spec(settings, config_only=config_only)
    check_context_length(model.architecture, settings, path=settings.model.path)
    return model


def read_critic(settings: Settings, model: ModelSpec, *, config_only: bool = False) -> NetworkSpec | None:
    """Reads the model that the critic starts from, or only its `config.json`; returns None without a critic."""
    if not settings.has_critic:
        return None
    critic = read_critic_spec(settings, model, config_only=config_only)
    check_context_length(critic.architecture, settings, path=settings.critic.path or settings.model.path)
    return critic


def read_teacher(settings: Settings, model: ModelSpec, *, config_only: bool = False) -> NetworkSpec | None:
    """Reads the model of `reference.path`, or only its `config.json`; returns None if the run has no teacher."""
    if not settings.has_teacher:
        return None
    teacher = read_reference_spec(settings, model, config_only=config_only)
    check_context_length(teacher.architecture, settings, path=f"reference.path {settings.reference.source}")
    return teacher


def read_checked_reward_model(settings: Settings) -> RewardModelSpec | None:
    """Reads the reward model and checks its context length; returns None if `reward.model` is not set."""
    reward_model = read_reward_model_spec(settings)
    if reward_model is not None:
        check_context_length(reward_model.architecture, settings, path=f"reward.model {settings.reward.model}")
    return reward_model


def read_train_rows(settings: Settings) -> Dataset:
    """Reads the training data: for sft with completions, otherwise with the reference answers for the rewards."""
    dataset = load_training_data(settings.data, seed=settings.run.seed, reads_completions=settings.is_supervised)
    if not settings.is_supervised:
        check_answers(dataset.rows, [function.name for function in settings.reward.functions])
    return dataset


def warn_of_misread_prompts(settings: Settings, rows: Sequence[DatasetRow], tokenizer: Tokenizer) -> None:
    """Warns if prompts seem to contain a rendered chat template or to be for a base model; see `misread_prompts`."""
    if (fault := misread_prompts(rows, tokenizer.template, settings.data)) is not None:
        log.warning("%s; %s", *fault)


def encode_train_data(
    settings: Settings, dataset: Dataset, tokenizer: Tokenizer
) -> tuple[Sequence[Prompt], Sequence[Sample], str]:
    """Returns the prompts of the training data, their completions for sft, and a report for users.

    Warns of unknown tokens.

    Raises:
        InputError: a completion cannot be encoded, or no prompt of the data or of a source in a mixture is left.
    """
    prompts, encoded = encode_prompts(dataset.rows, tokenizer, settings.data)
    warn_of_misread_prompts(settings, dataset.rows, tokenizer)
    _check_parts(dataset, prompts, "prompt", "data.max_prompt_length")
    looked_at = evenly_spaced(prompts, NUM_PROMPTS_LOOKED_AT)
    share = np.mean(np.concatenate([prompt.token_ids for prompt in looked_at]) == tokenizer.unk_id)
    if share >= MAX_UNKNOWN_SHARE:
        log.warning(
            "%s of the tokens of the prompts are unknown to the tokenizer of %s, so the model cannot read them; use "
            "a model for the data's language",
            *(format_percent(share), settings.model.path),
        )
    report = f"{dataset.to_text()}\n{encoded.text}"
    if not settings.is_supervised:
        return prompts, (), report
    encoder = CompletionEncoder(tokenizer, settings.data, stop=settings.rollout.stop)
    places = {row.uid: row.where for row in dataset.rows if row.where}
    samples, text = encode_completions(prompts, encoder, max_tokens=settings.rollout.max_new_tokens, places=places)
    _check_parts(dataset, samples, "completion", "rollout.max_new_tokens")
    return [sample.prompt for sample in samples], samples, f"{report}\n{text}"


def _check_parts(dataset: Dataset, left: Sequence[Prompt] | Sequence[Sample], what: str, limit: str) -> None:
    """Raises InputError if `limit`, a setting, has dropped all rows of a source in a mixture.

    Args:
        what: word for a row in the error message, such as `prompt`.
    """
    numbers = {one.uid.partition("/")[0] for one in left}
    if empty := next((part.source for i, part in enumerate(dataset.parts) if str(i) not in numbers), None):
        raise InputError(
            f"data.source: every {what} of {empty} is longer than {limit}; raise this setting, or remove the source"
        )


def read_eval_rows(settings: Settings) -> Sequence[DatasetRow]:
    """Reads the evaluation data and checks that its reference answers can be used for grading."""
    data = settings.data
    rows = load_held_out_data(data, num_prompts=settings.eval.num_prompts).rows
    held_out = data.eval_source or f"null, that is data.source: {data.source}"
    check_answers(rows, [accuracy_function_name(settings.reward)], eval_source=held_out)
    return rows


def read_eval_prompts(settings: Settings, tokenizer: Tokenizer) -> tuple[list[Prompt], EncodeReport]:
    """Reads and tokenizes the prompts of evaluations, and reports how many were dropped."""
    rows = read_eval_rows(settings)
    warn_of_misread_prompts(settings, rows, tokenizer)
    return encode_prompts(rows, tokenizer, settings.data)
