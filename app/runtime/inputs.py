"""Models, prompts and rewards as settings name them, read and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.prompts.data_sources import load_held_out_data, load_training_data
from app.prompts.dataset import Dataset, Row
from app.prompts.encode import ChatTokenizer, EncodeReport, encode_prompts
from app.records.sample import Prompt
from app.reward.overlong import OverlongPenalty
from app.reward.plugin_signature import Columns
from app.reward.reward_functions import Rewards, judge_of
from app.reward.tasks import check_answers
from app.runtime.model_spec import CriticInput, ModelInput, check_context, read_critic_input, read_model_input
from app.runtime.reward_model import RewardModelInput, check_reward_context, read_reward_model
from settings import Settings

DataRows = Sequence[Prompt] | Sequence[Row]
"""Of a data set, as tokens or not yet."""


def rewards_over(settings: Settings, asked: DataRows, held_out: DataRows) -> Rewards:
    """The reward functions of a run over these questions, not yet imported."""
    columns = data_columns(settings, asked)
    of_held_out = held_out_columns(settings, held_out) if held_out else None
    return Rewards(settings.reward, columns, of_held_out, overlong_penalty(settings))


def overlong_penalty(settings: Settings) -> OverlongPenalty | None:
    """What length costs; None where it costs nothing."""
    buffer = settings.reward.overlong_buffer
    if buffer is None:
        return None
    return OverlongPenalty(settings.rollout.max_new_tokens, buffer, settings.reward.overlong_penalty)


def data_columns(settings: Settings, asked: DataRows) -> Columns:
    """What plug-ins can be given of what was read under `data.*`."""
    data = settings.data
    return Columns.of(asked, source=data.source, prompt_column=data.prompt_column, answer_column=data.answer_column)


def held_out_columns(settings: Settings, asked: DataRows) -> Columns:
    """The same of what an evaluation asks."""
    return replace(data_columns(settings, asked), source=settings.data.eval_source or settings.data.source)


def read_policy(settings: Settings) -> ModelInput:
    """The model of `model.path` and its tokenizer.

    Raises:
        InputError: it cannot be used, or not for samples as long as the settings allow. So do the next.
    """
    model = read_model_input(settings)
    check_context(model.architecture, settings, path=settings.model.path)
    return model


def read_critic(settings: Settings, model: ModelInput) -> CriticInput | None:
    """What the critic starts from; None for a run without one."""
    if not settings.has_critic:
        return None
    critic = read_critic_input(settings, model)
    check_context(critic.architecture, settings, path=settings.critic.path or settings.model.path)
    return critic


def read_judge(settings: Settings) -> RewardModelInput | None:
    """The reward model; None for a run without one."""
    reward_model = read_reward_model(settings)
    if reward_model is not None:
        check_reward_context(reward_model, settings)
    return reward_model


def read_rows(settings: Settings) -> Dataset:
    """What is trained on, with answers that the reward functions can use."""
    dataset = load_training_data(settings.data, seed=settings.run.seed)
    check_answers(dataset.rows, [function.name for function in settings.reward.functions])
    return dataset


def encode_rows(settings: Settings, rows: Sequence[Row], tokenizer: ChatTokenizer) -> tuple[list[Prompt], EncodeReport]:
    """The rows as prompts, under `data.*`."""
    return encode_prompts(
        rows,
        tokenizer,
        system_prompt=settings.data.system_prompt,
        max_prompt_length=settings.data.max_prompt_length,
        overlong=settings.data.overlong_prompts,
    )


def read_held_out_rows(settings: Settings) -> Sequence[Row]:
    """What evaluations ask, with answers that can all be judged."""
    data = settings.data
    rows = load_held_out_data(data, num_prompts=settings.eval.num_prompts).rows
    held_out = data.eval_source or f"null, that is data.source: {data.source}"
    check_answers(rows, [judge_of(settings.reward)], held_out=held_out)
    return rows


def read_held_out(settings: Settings, tokenizer: ChatTokenizer) -> tuple[list[Prompt], EncodeReport]:
    """The prompts of an evaluation."""
    return encode_rows(settings, read_held_out_rows(settings), tokenizer)
