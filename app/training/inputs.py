"""Reads the inputs of a training run: model files, tokenizer, training and evaluation prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.checkpoint.saved_policy import PolicyCheckpoint
from app.evaluation.prompt_metrics import check_best_metric
from app.prompts.dataset import Dataset
from app.records.run_directory import RunDirectory
from app.records.sample import Prompt, Sample
from app.reward.reward_functions import RewardFunctions
from app.runtime.environments import prepare_turns
from app.runtime.inputs import (
    data_columns,
    encode_train_data,
    eval_columns,
    make_rewards,
    read_checked_reward_model,
    read_critic,
    read_eval_prompts,
    read_policy,
    read_teacher,
    read_train_rows,
)
from app.runtime.model_spec import ModelSpec, NetworkSpec
from app.runtime.reward_model import RewardModelSpec
from app.training.replay import NO_OPTIONS, Replay, StartRequest, read_replay
from settings import Settings
from settings.errors import InputError

DATA, WEIGHTS = "data", "the weights of the sources in data.source"
TEACHER, REWARD_MODEL = "the teacher, the model of reference.path", "the reward model"
TEMPLATE_KWARGS, EOS_TOKENS = "data.chat_template_kwargs", "model.eos_tokens"
PROMPTS_PER_STEP = "rollout.prompts_per_step over all hosts"
MINI_BATCH_PROMPTS = "algorithm.mini_batch_prompts over all hosts"
PROMPT_ORDER = "the order of prompts (run.seed, data.shuffle, data.max_prompt_length, data.overlong_prompts)"
"""These constants name the fingerprints of a run's inputs."""


CHANGEABLE_FINGERPRINTS = {
    DATA: ("data", "run.seed"),  # The seed draws the problems of builtin:arithmetic.
    PROMPT_ORDER: ("data", "run.seed"),
    WEIGHTS: ("data",),
    TEACHER: ("reference",),
    REWARD_MODEL: ("reward",),
    TEMPLATE_KWARGS: (TEMPLATE_KWARGS,),
    EOS_TOKENS: (EOS_TOKENS,),
    PROMPTS_PER_STEP: ("rollout.prompts_per_step",),
    MINI_BATCH_PROMPTS: ("algorithm.mini_batch_prompts", "rollout.prompts_per_step"),
}
"""Maps a fingerprint to settings: `--allow-changed` with any of them lets a resumed run change the fingerprint.

The fingerprints of policy and critic must not change, because their arrays come from the checkpoint.
"""


@dataclass(frozen=True)
class TrainingInputs:
    """The inputs of a run, checked before any device is used."""

    model: ModelSpec
    critic: NetworkSpec | None
    """The model that the critic starts from; None without a critic."""
    prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    fingerprints: dict[str, str]
    data_report: str
    """Report for users: how columns are mapped, and how many prompts are kept and dropped."""
    reward_model: RewardModelSpec | None = None
    teacher: NetworkSpec | None = None
    """The model of `reference.path`; None if it is not used."""
    replay: Replay | None = None
    """The saved samples to train on; None if samples are generated."""
    given: Sequence[Sample] = ()
    """Samples made from the completions in the data; empty if samples are generated or replayed."""
    start: PolicyCheckpoint | None = None
    """The checkpoint of --checkpoint: a replay continues from its step, another run starts from its policy."""

    @property
    def judged_prompts(self) -> Sequence[Prompt]:
        """Prompts whose completions are rewarded; if the data has the completions, only evaluation prompts."""
        return self.eval_prompts if self.given else self.prompts

    @property
    def model_commits(self) -> dict[str, str | None]:
        """Hub commit of the model in each section of the settings; None for models that are not from the hub."""
        reward, teacher = self.reward_model, self.teacher
        return {
            "model": self.model.files.commit,
            "reference": teacher and teacher.files.commit,
            "critic": self.critic and self.critic.files.commit,
            "reward": reward and reward.files.commit,
        }

    def make_rewards(self, settings: Settings) -> RewardFunctions:
        """Returns the reward functions for these prompts, a context manager that imports plug-ins on entry."""
        held_out_columns = eval_columns(settings, self.eval_prompts) if self.eval_prompts else None
        if not self.judged_prompts:
            settings = settings.model_copy(update={"reward": settings.reward.model_copy(update={"functions": ()})})
        return make_rewards(settings, data_columns(settings, self.judged_prompts), held_out_columns)


def read_training_inputs(settings: Settings, start_request: StartRequest = NO_OPTIONS) -> TrainingInputs:
    """Reads and checks model files, tokenizer, training and evaluation prompts, and the inputs in `start_request`.

    Raises:
        InputError: an input cannot be used.
    """
    model = read_policy(settings)
    rollouts, start = start_request.rollouts, _open_start(settings, model, start_request.checkpoint)
    if rollouts is None or settings.eval.every_steps:
        prepare_turns(settings, model.tokenizer)
    critic, teacher = read_critic(settings, model), read_teacher(settings, model)
    replay, given = None, ()
    if rollouts is None:
        dataset = read_train_rows(settings)
        prompts, given, data_report = encode_train_data(settings, dataset, model.tokenizer)
        data_fingerprints = dataset_fingerprints(settings, dataset)
    else:
        if settings.is_supervised:
            raise InputError(
                "--from-rollouts: algorithm.name: sft trains on the completions of data.source, not on samples; omit "
                "this option, or choose another algorithm.name"
            )
        target_run = RunDirectory.from_settings(settings.run)
        replay = read_replay(rollouts, start, settings, model, critic, target_run=target_run)
        prompts, data_report, data_fingerprints = replay.prompts, replay.report, replay.fingerprints
    # Saved rewards need no reward model.
    reward_model = None if replay is not None and replay.uses_saved_rewards else read_checked_reward_model(settings)
    if reward_model is not None:
        reward_model.check_prompt(prompts[0])
    held_out: Sequence[Prompt] = ()
    if settings.eval.every_steps:
        held_out, _ = read_eval_prompts(settings, model.tokenizer)
        check_best_metric(settings, held_out)
    fingerprints = input_fingerprints(model, data_fingerprints, critic, reward_model, teacher)
    if start is not None:
        fingerprints["the checkpoint of --checkpoint"] = start.describe()
        data_report = f"starts from the {'state' if replay else 'policy'} of {start.path}\n{data_report}"
    data = prompts, held_out, fingerprints, data_report
    return TrainingInputs(model, critic, *data, reward_model, teacher, replay, given, start)


def _open_start(settings: Settings, model: ModelSpec, checkpoint: Path | None) -> PolicyCheckpoint | None:
    """Opens the checkpoint of --checkpoint; raises InputError if it belongs to this run or does not fit the model."""
    if checkpoint is None:
        return None
    start, own = PolicyCheckpoint.open(checkpoint), RunDirectory.from_settings(settings.run)
    if start.run.path == own.path.resolve():
        raise InputError(
            f"run.name: {own.path} is the run of --checkpoint; choose another run.name, or continue that run "
            "with --resume auto, without --checkpoint"
        )
    start.check_compatible(model)
    return start


def input_fingerprints(
    model: ModelSpec,
    data_fingerprints: Mapping[str, str],
    critic: NetworkSpec | None,
    reward_model: RewardModelSpec | None,
    teacher: NetworkSpec | None,
) -> dict[str, str]:
    """Returns the fingerprints of a run's inputs, which must be equal in a resumed run and on all hosts.

    Args:
        data_fingerprints: the fingerprints of the data set or of the replayed files.
    """
    fingerprints = {
        "model": model.files.fingerprint,
        "tokenizer": model.tokenizer.fingerprint,
        EOS_TOKENS: str(model.tokenizer.eos_ids),
        **model.adapter_fingerprints,
        **data_fingerprints,
    }
    if model.tokenizer.template.kwargs:
        fingerprints[TEMPLATE_KWARGS] = json.dumps(model.tokenizer.template.kwargs, sort_keys=True)
    if critic is not None:
        fingerprints["the critic"] = critic.files.fingerprint
    if reward_model is not None:
        fingerprints[REWARD_MODEL] = reward_model.files.fingerprint
    if teacher is not None:
        fingerprints[TEACHER] = teacher.files.fingerprint
    return fingerprints


def dataset_fingerprints(settings: Settings, dataset: Dataset) -> dict[str, str]:
    """Returns the fingerprints of a data set and of the order of its prompts."""
    weights = [one.weight for one in settings.data.sources]
    return {
        DATA: dataset.fingerprint,
        PROMPT_ORDER: (
            f"{settings.run.seed}, {settings.data.shuffle}, {settings.data.max_prompt_length}, "
            f"{settings.data.overlong_prompts}"
        ),
        **({} if isinstance(settings.data.source, str) else {WEIGHTS: str(weights)}),
    }
