"""Models, prompts and rewards as settings name them, read and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.prompts.data_sources import load_held_out_data, load_training_data
from app.prompts.dataset import Dataset, DatasetRow
from app.prompts.encode import ChatTokenizer, EncodeReport, encode_prompts
from app.records.sample import Prompt
from app.reward.overlong import OverlongPenalty
from app.reward.plugin_signature import DataColumns
from app.reward.reward_functions import RewardFunctions, accuracy_function_name
from app.reward.tasks import check_answers
from app.runtime.model_spec import CriticSpec, ModelSpec, check_context_length, read_critic_spec, read_model_spec
from app.runtime.reward_model import RewardModelSpec, check_reward_context_length, read_reward_model_spec
from settings import Settings

PromptsOrRows = Sequence[Prompt] | Sequence[DatasetRow]
"""Of a data set, as tokens or not yet."""


def make_rewards(settings: Settings, train_rows: PromptsOrRows, eval_rows: PromptsOrRows) -> RewardFunctions:
    """The reward functions of a run over these questions, not yet imported."""
    columns = data_columns(settings, train_rows)
    of_held_out = eval_columns(settings, eval_rows) if eval_rows else None
    return RewardFunctions(settings.reward, columns, of_held_out, make_overlong_penalty(settings))


def make_overlong_penalty(settings: Settings) -> OverlongPenalty | None:
    """What length costs; None where it costs nothing."""
    buffer = settings.reward.overlong_buffer
    if buffer is None:
        return None
    return OverlongPenalty(settings.rollout.max_new_tokens, buffer, settings.reward.overlong_penalty)


def data_columns(settings: Settings, rows: PromptsOrRows) -> DataColumns:
    """What plug-ins can be given of what was read under `data.*`."""
    data = settings.data
    return DataColumns.from_rows(
        rows, source=data.source, prompt_column=data.prompt_column, answer_column=data.answer_column
    )


def eval_columns(settings: Settings, rows: PromptsOrRows) -> DataColumns:
    """The same of what an evaluation asks."""
    return replace(data_columns(settings, rows), source=settings.data.eval_source or settings.data.source)


def read_policy(settings: Settings) -> ModelSpec:
    """The model of `model.path` and its tokenizer.

    Raises:
        InputError: it cannot be used, or not for samples as long as the settings allow. So do the next.
    """
    model = read_model_spec(settings)
    check_context_length(model.architecture, settings, path=settings.model.path)
    return model


def read_critic(settings: Settings, model: ModelSpec) -> CriticSpec | None:
    """What the critic starts from; None for a run without one."""
    if not settings.has_critic:
        return None
    critic = read_critic_spec(settings, model)
    check_context_length(critic.architecture, settings, path=settings.critic.path or settings.model.path)
    return critic


def read_checked_reward_model(settings: Settings) -> RewardModelSpec | None:
    """The reward model; None for a run without one."""
    reward_model = read_reward_model_spec(settings)
    if reward_model is not None:
        check_reward_context_length(reward_model, settings)
    return reward_model


def read_train_rows(settings: Settings) -> Dataset:
    """What is trained on, with answers that the reward functions can use."""
    dataset = load_training_data(settings.data, seed=settings.run.seed)
    check_answers(dataset.rows, [function.name for function in settings.reward.functions])
    return dataset


def encode_rows(
    settings: Settings, rows: Sequence[DatasetRow], tokenizer: ChatTokenizer
) -> tuple[list[Prompt], EncodeReport]:
    """The rows as prompts, under `data.*`."""
    return encode_prompts(
        rows,
        tokenizer,
        system_prompt=settings.data.system_prompt,
        max_prompt_length=settings.data.max_prompt_length,
        overlong=settings.data.overlong_prompts,
    )


def read_eval_rows(settings: Settings) -> Sequence[DatasetRow]:
    """What evaluations ask, with answers that can all be judged."""
    data = settings.data
    rows = load_held_out_data(data, num_prompts=settings.eval.num_prompts).rows
    held_out = data.eval_source or f"null, that is data.source: {data.source}"
    check_answers(rows, [accuracy_function_name(settings.reward)], eval_source=held_out)
    return rows


def read_eval_prompts(settings: Settings, tokenizer: ChatTokenizer) -> tuple[list[Prompt], EncodeReport]:
    """The prompts of an evaluation."""
    return encode_rows(settings, read_eval_rows(settings), tokenizer)
