"""Everything a run reads: model files, tokenizer, training and evaluation prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.evaluation.metrics import check_best_metric
from app.prompts.dataset import Dataset
from app.prompts.encode import ChatTokenizer
from app.records.run_directory import RunDirectory
from app.records.sample import Prompt
from app.reward.reward_functions import Rewards, judge_of
from app.runtime.inputs import (
    DataRows,
    encode_rows,
    read_critic,
    read_held_out,
    read_judge,
    read_policy,
    read_rows,
    rewards_over,
)
from app.runtime.model_spec import CriticInput, ModelInput
from app.runtime.reward_model import RewardModelInput
from app.training.replay import Asked, Replay, read_replay
from settings import Settings


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
