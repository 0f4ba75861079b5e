"""Everything a run reads: model files, tokenizer, training and evaluation prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from app.prompts.dataset import Dataset, Row
from app.prompts.encode import ChatTokenizer, EncodeReport, encode_prompts
from app.prompts.source import load_held_out_data, load_training_data
from app.records.run_directory import RunDirectory
from app.records.sample import Prompt
from app.reward.overlong import OverlongPenalty
from app.reward.rewards import Rewards, judge_of
from app.reward.signature import Columns
from app.reward.tasks import check_answers
from app.training.evaluation_figures import check_best_metric
from app.training.model_input import CriticInput, ModelInput, check_context, read_critic_input, read_model_input
from app.training.replay import Asked, Replay, read_replay
from app.training.reward_role import RewardModelInput, check_reward_context, read_reward_model
from settings import Settings

DataRows = Sequence[Prompt] | Sequence[Row]
"""Of a data set, as tokens or not yet."""


@dataclass(frozen=True)
class TrainingInput:
    """Everything a run reads, checked before any device is touched."""

    model: ModelInput
    critic: CriticInput | None
    """What the critic starts from; None, and no memory, without one."""
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    fingerprints: dict[str, str]
    report: str
    """What a person should know of the data: column mapping, prompts kept and dropped."""
    reward_model: RewardModelInput | None = None
    replay: Replay | None = None
    """The samples to learn from; None: they are generated."""

    @property
    def commits(self) -> dict[str, str | None]:
        """Of the models that settings name, by section; None where one is not from the hub."""
        reward = self.reward_model
        return {
            "model": self.model.files.commit,
            "critic": self.critic and self.critic.files.commit,
            "reward": reward and reward.files.commit,
        }

    def rewards(self, settings: Settings) -> Rewards:
        """The reward functions over these data; importing them is what entering it does."""
        return rewards_over(settings, self.prompts, self.held_out)


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


def read_held_out_of_run(settings: Settings, tokenizer: ChatTokenizer) -> Sequence[Prompt]:
    """What the evaluations of a run ask; nothing for a run without any."""
    if not settings.eval.every_steps:
        return ()
    held_out, _ = read_held_out(settings, tokenizer)
    check_best(settings, held_out)
    return held_out


def check_best(settings: Settings, held_out: DataRows) -> None:
    """Raises InputError where evaluations of these do not measure what chooses the best checkpoint."""
    if settings.checkpoint.best_metric is not None:
        judge, num_samples = judge_of(settings.reward), settings.eval.num_samples
        check_best_metric(settings.checkpoint.best_metric, held_out, judge=judge, num_samples=num_samples)


def read_training_input(settings: Settings, asked: Asked | None = None) -> TrainingInput:
    """Model files, tokenizer, training and evaluation prompts.

    Args:
        asked: to learn from samples of files, which bring their prompts.

    Raises:
        InputError: for whatever about them cannot be used.
    """
    model = read_policy(settings)
    critic = read_critic(settings, model)
    replay = None
    if asked is not None:
        replay = read_replay(asked, settings, model, critic, into=RunDirectory.of(settings.run))
    source = _of_dataset(settings, model.tokenizer) if replay is None else _of_samples(replay)
    # Rewards that the samples bring need no model.
    reward_model = None if replay is not None and replay.takes_rewards else read_judge(settings)
    if reward_model is not None:
        reward_model.check_prompt(source.prompts[0])
    held_out = read_held_out_of_run(settings, model.tokenizer)
    fingerprints = fingerprints_of(model, source.fingerprints, critic, reward_model)
    return TrainingInput(model, critic, source.prompts, held_out, fingerprints, source.report, reward_model, replay)


def fingerprints_of(
    model: ModelInput,
    source: Mapping[str, str],
    critic: CriticInput | None,
    reward_model: RewardModelInput | None,
) -> dict[str, str]:
    """What a run is a run of, by what it is: of a resumed run and of other hosts they are the same.

    Args:
        source: those of where it has its prompts from.
    """
    fingerprints = {
        "model": model.files.fingerprint,
        "tokenizer": model.tokenizer.fingerprint,
        **model.adapters,
        **source,
    }
    if critic is not None:
        fingerprints["the critic"] = critic.files.fingerprint
    if reward_model is not None:
        fingerprints["the reward model"] = reward_model.files.fingerprint
    return fingerprints


class Source(NamedTuple):
    """Where a run has its training prompts from."""

    prompts: Sequence[Prompt]
    report: str
    fingerprints: dict[str, str]


def _of_dataset(settings: Settings, tokenizer: ChatTokenizer) -> Source:
    dataset = read_rows(settings)
    prompts, report = encode_rows(settings, dataset.rows, tokenizer)
    return Source(prompts, f"{dataset.to_text()}\n{report.to_text()}", fingerprints_of_data(settings, dataset))


def fingerprints_of_data(settings: Settings, dataset: Dataset) -> dict[str, str]:
    """Those of a data set and of the order in which it is gone through."""
    return {
        "data": dataset.fingerprint,
        "the order of prompts (run.seed, data.shuffle, data.max_prompt_length, data.overlong_prompts)": (
            f"{settings.run.seed}, {settings.data.shuffle}, {settings.data.max_prompt_length}, "
            f"{settings.data.overlong_prompts}"
        ),
    }


def _of_samples(replay: Replay) -> Source:
    return Source(replay.prompts, replay.report, replay.fingerprints)
