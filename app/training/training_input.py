"""Everything a run reads: model files, tokenizer, training and evaluation prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from app.flow import Prompt
from app.prompts.encode import encode_prompts
from app.prompts.source import load_held_out_data, load_training_data
from app.reward.overlong import OverlongPenalty
from app.reward.rewards import Rewards, judge_of
from app.reward.signature import Columns
from app.reward.tasks import check_answers
from app.training.evaluate import check_best_metric
from app.training.model_input import CriticInput, ModelInput, check_context, read_critic_input, read_model_input
from app.training.replay import Asked, Replay, read_replay
from app.training.reward_role import RewardModelInput, check_reward_context, read_reward_model
from app.training.run_directory import RunDirectory
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
        columns, held_out = data_columns(settings, self.prompts), None
        if self.held_out:
            source = settings.data.eval_source or settings.data.source
            held_out = replace(data_columns(settings, self.held_out), source=source)
        return Rewards(settings.reward, columns, held_out, overlong_penalty(settings))


def overlong_penalty(settings: Settings) -> OverlongPenalty | None:
    """What length costs; None where it costs nothing."""
    buffer = settings.reward.overlong_buffer
    if buffer is None:
        return None
    return OverlongPenalty(settings.rollout.max_new_tokens, buffer, settings.reward.overlong_penalty)


def data_columns(settings: Settings, prompts: Sequence[Prompt]) -> Columns:
    """What plug-ins can be given of prompts that were read under `data.*`."""
    data = settings.data
    return Columns.of(prompts, source=data.source, prompt_column=data.prompt_column, answer_column=data.answer_column)


def read_training_input(settings: Settings, asked: Asked | None = None) -> TrainingInput:
    """Model files, tokenizer, training and evaluation prompts.

    Args:
        asked: to learn from samples of files, which bring their prompts.

    Raises:
        InputError: for whatever about them cannot be used.
    """
    model = read_model_input(settings)
    check_context(model.architecture, settings, path=settings.model.path)
    critic = None
    if settings.has_critic:
        critic = read_critic_input(settings, model)
        check_context(critic.architecture, settings, path=settings.critic.path or settings.model.path)
    replay = None
    if asked is not None:
        replay = read_replay(asked, settings, model, critic, into=RunDirectory.of(settings.run))
    source = _of_dataset(settings, model) if replay is None else _of_samples(replay)
    # Rewards that the samples bring need no model.
    reward_model = None if replay is not None and replay.takes_rewards else read_reward_model(settings)
    if reward_model is not None:
        check_reward_context(reward_model, settings)
        reward_model.check_prompt(source.prompts[0])
    fingerprints = {
        "model": model.files.fingerprint,
        "tokenizer": model.tokenizer.fingerprint,
        **model.adapters,
        **source.fingerprints,
    }
    if critic is not None:
        fingerprints["the critic"] = critic.files.fingerprint
    if reward_model is not None:
        fingerprints["the reward model"] = reward_model.files.fingerprint
    held_out = _read_held_out(settings, model)
    return TrainingInput(model, critic, source.prompts, held_out, fingerprints, source.report, reward_model, replay)


class Source(NamedTuple):
    """Where a run has its training prompts from."""

    prompts: Sequence[Prompt]
    report: str
    fingerprints: dict[str, str]


def _of_dataset(settings: Settings, model: ModelInput) -> Source:
    dataset = load_training_data(settings.data, seed=settings.run.seed)
    check_answers(dataset.rows, [function.name for function in settings.reward.functions])
    prompts, report = encode_prompts(dataset.rows, model.tokenizer, **_encoding(settings))
    fingerprints = {
        "data": dataset.fingerprint,
        "the order of prompts (run.seed, data.shuffle, data.max_prompt_length, data.overlong_prompts)": (
            f"{settings.run.seed}, {settings.data.shuffle}, {settings.data.max_prompt_length}, "
            f"{settings.data.overlong_prompts}"
        ),
    }
    return Source(prompts, f"{dataset.to_text()}\n{report.to_text()}", fingerprints)


def _of_samples(replay: Replay) -> Source:
    return Source(replay.prompts, replay.report, {"the samples of --from-rollouts": replay.fingerprint})


def _read_held_out(settings: Settings, model: ModelInput) -> Sequence[Prompt]:
    """The evaluation prompts; none where nothing is evaluated."""
    if not settings.eval.every_steps:
        return ()
    rows = load_held_out_data(settings.data, num_prompts=settings.eval.num_prompts).rows
    check_answers(rows, [judge_of(settings.reward)])
    held_out, _ = encode_prompts(rows, model.tokenizer, **_encoding(settings))
    if settings.checkpoint.best_metric is not None:
        check_best_metric(settings.checkpoint.best_metric, held_out, judge=judge_of(settings.reward))
    return held_out


def _encoding(settings: Settings) -> dict[str, Any]:
    data = settings.data
    return {
        "system_prompt": data.system_prompt,
        "max_prompt_length": data.max_prompt_length,
        "overlong": data.overlong_prompts,
    }
