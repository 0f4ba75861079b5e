"""Everything a run reads: model files, tokenizer, training and evaluation prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.flow import Prompt
from app.prompts.dataset import Row
from app.prompts.encode import ChatTokenizer, EncodeReport, encode_prompts
from app.prompts.source import load_held_out_data, load_training_data
from app.reward.overlong import OverlongPenalty
from app.reward.rewards import Rewards, judge_of
from app.reward.signature import Columns
from app.reward.tasks import check_answers
from app.training.evaluation_figures import check_best_metric
from app.training.model_input import CriticInput, ModelInput, check_context, read_critic_input, read_model_input
from app.training.reward_role import RewardModelInput, check_reward_context, read_reward_model
from settings import Settings
from settings.schema import Data


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
            held_out = held_out_columns(settings, self.held_out)
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


def held_out_columns(settings: Settings, prompts: Sequence[Prompt]) -> Columns:
    """The same of the prompts of an evaluation."""
    return replace(data_columns(settings, prompts), source=settings.data.eval_source or settings.data.source)


def encoded(rows: Sequence[Row], data: Data, tokenizer: ChatTokenizer) -> tuple[list[Prompt], EncodeReport]:
    """The rows as prompts, as `data.*` says."""
    return encode_prompts(
        rows,
        tokenizer,
        system_prompt=data.system_prompt,
        max_prompt_length=data.max_prompt_length,
        overlong=data.overlong_prompts,
    )


def read_held_out(settings: Settings, tokenizer: ChatTokenizer) -> tuple[list[Prompt], EncodeReport]:
    """The prompts of an evaluation, which can all be judged.

    Raises:
        InputError: the data set cannot be used, or lacks answers.
    """
    rows = load_held_out_data(settings.data, num_prompts=settings.eval.num_prompts).rows
    check_answers(rows, [judge_of(settings.reward)])
    return encoded(rows, settings.data, tokenizer)


def read_training_input(settings: Settings) -> TrainingInput:
    """Model files, tokenizer, training and evaluation prompts.

    Raises:
        InputError: for whatever about them cannot be used.
    """
    model = read_model_input(settings)
    check_context(model.architecture, settings, path=settings.model.path)
    critic = None
    if settings.has_critic:
        critic = read_critic_input(settings, model)
        check_context(critic.architecture, settings, path=settings.critic.path or settings.model.path)
    reward_model = read_reward_model(settings)
    if reward_model is not None:
        check_reward_context(reward_model, settings)
    dataset = load_training_data(settings.data, seed=settings.run.seed)
    check_answers(dataset.rows, [function.name for function in settings.reward.functions])
    prompts, report = encoded(dataset.rows, settings.data, model.tokenizer)
    if reward_model is not None:
        reward_model.check_prompt(prompts[0])
    held_out: Sequence[Prompt] = ()
    if settings.eval.every_steps:
        held_out, _ = read_held_out(settings, model.tokenizer)
        if settings.checkpoint.best_metric is not None:
            judge, num_samples = judge_of(settings.reward), settings.eval.num_samples
            check_best_metric(settings.checkpoint.best_metric, held_out, judge=judge, num_samples=num_samples)
    fingerprints = {
        "model": model.files.fingerprint,
        "tokenizer": model.tokenizer.fingerprint,
        "data": dataset.fingerprint,
        "the order of prompts (run.seed, data.shuffle, data.max_prompt_length, data.overlong_prompts)": (
            f"{settings.run.seed}, {settings.data.shuffle}, {settings.data.max_prompt_length}, "
            f"{settings.data.overlong_prompts}"
        ),
    }
    if critic is not None:
        fingerprints["the critic"] = critic.files.fingerprint
    if reward_model is not None:
        fingerprints["the reward model"] = reward_model.files.fingerprint
    report_text = f"{dataset.to_text()}\n{report.to_text()}"
    return TrainingInput(model, critic, prompts, held_out, fingerprints, report_text, reward_model)
