"""The reward model of a run: looked at before any device work, loaded once, asked at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32

from app.batching.metrics import scoring_metrics
from app.batching.micro_batcher import Cut, FixedRows, PackedRows
from app.model.architecture import Architecture
from app.model.decoder import DecoderDefinition, Params, ValueDecoder
from app.model.io.families import SEQUENCE_CLASSIFICATION, architecture_from_config
from app.model.io.hf_weights import VALUE_HEAD, check_tensors, expected_entries, load_weights
from app.model.io.model_files import ModelFiles, open_model
from app.prompts.conversation import Conversations, load_conversations
from app.records.sample import Prompt, Sample
from app.reward.reward_outcome import Failure, Outcome, one_line
from app.runtime.micro_batching import Longest, wire_role
from app.runtime.model_spec import naming
from app.runtime.session import compute_type
from app.score.reward_model_inputs import as_read
from app.score.scorer import Valuer
from settings import Settings
from settings.errors import InputError


class RewardModelInput(NamedTuple):
    """A reward model that has been looked at but not yet loaded: no device has been touched."""

    files: ModelFiles
    architecture: Architecture
    definition: DecoderDefinition
    conversations: Conversations

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises InputError where the model cannot read a prompt of this kind."""
        with naming("reward.model", revision="reward.model_revision"):
            self.conversations.ids(prompt, completion="")


def read_reward_model(settings: Settings) -> RewardModelInput | None:
    """The model of `reward.model`; None where there is none.

    Raises:
        InputError: anything about it that would only fail later, on the device.
    """
    if settings.reward.model is None:
        return None
    with naming("reward.model", revision="reward.model_revision"):
        files = open_model(settings.reward.model, revision=settings.reward.model_revision)
        architecture = architecture_from_config(files.config, heads=SEQUENCE_CLASSIFICATION)
        definition = DecoderDefinition.of(architecture, ValueDecoder)
        _check_one_label(files, architecture)
        check_tensors(expected_entries(definition), files.weights.shapes, architecture)
        conversations = load_conversations(files, system_prompt=settings.data.system_prompt)
    return RewardModelInput(files, architecture, definition, conversations)


def check_reward_context(model: RewardModelInput, settings: Settings) -> None:
    """Raises InputError where the longest sample, in the policy's tokens, is longer than the model's context."""
    prompt, completion = settings.data.max_prompt_length, settings.rollout.max_new_tokens
    if prompt + completion > model.architecture.max_positions:
        raise InputError(
            f"reward.model: data.max_prompt_length + rollout.max_new_tokens = {prompt} + {completion} = "
            f"{prompt + completion} tokens, but the context of {settings.reward.model} holds "
            f"{model.architecture.max_positions}; lower one of the two, or choose another reward model"
        )


def _check_one_label(files: ModelFiles, architecture: Architecture) -> None:
    shape = files.weights.shapes.get(VALUE_HEAD)
    if shape is not None and len(shape) == 2 and shape[0] != 1:
        raise InputError(
            f"model.path: {files.name} has {shape[0]} labels ({VALUE_HEAD} is {shape}, expected "
            f"{(1, architecture.model_dim)}); a reward model gives one score, num_labels 1"
        )


def wire_reward(settings: Settings, architecture: Architecture) -> FixedRows | PackedRows:
    """How conversations are cut for the reward model: rows hold any that its context and the quota allow."""
    # One more: what stands behind the last token, which the score is read at.
    longest = architecture.max_positions + 1
    quota = settings.score.reward.max_tokens_per_device
    return wire_role(
        settings, "reward", architecture, Longest(min(longest, quota or longest), Longest.of(settings).group)
    )


@dataclass(frozen=True)
class RewardModel:
    """A reward model on a mesh, its weights loaded."""

    input: RewardModelInput
    mesh: Mesh
    valuer: Valuer
    params: Params
    cut: FixedRows | PackedRows
    scans: bool
    """In one compiled scan; else one micro-batch after another."""

    @classmethod
    def load(cls, settings: Settings, model: RewardModelInput, mesh: Mesh) -> RewardModel:
        """The weights float32, on their shardings; computing in `model.dtype`."""
        return cls(
            model,
            mesh,
            Valuer(model.definition, mesh, dtype=compute_type(settings)),
            load_weights(model.definition, model.files.weights, mesh),
            wire_reward(settings, model.architecture),
            scans=settings.score.reward.strategy == "scan",
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation that can be scored."""
        context = self.input.architecture.max_positions
        return min(context, self.cut.budget.row_length - 1) if isinstance(self.cut, PackedRows) else context

    def outcomes(self, samples: Sequence[Sample]) -> tuple[list[Outcome], Cut]:
        """What the model says of each of this host's samples, and how they were cut. Every host asks at once."""
        texts = [self._text(sample) for sample in samples]
        readable = [(s, text) for s, text in zip(samples, texts, strict=True) if not isinstance(text, Failure)]
        conversations = as_read([s for s, _ in readable], [text for _, text in readable])
        pieces = self.cut(conversations, self.mesh)
        run = self.valuer.scanned if self.scans else self.valuer.one_by_one
        values = iter(self.valuer.values(self.params, conversations, pieces.own, run=run))
        return [
            Outcome(failure=text) if isinstance(text, Failure) else _outcome(float(next(values)[-1])) for text in texts
        ], pieces

    def _text(self, sample: Sample) -> Int32[np.ndarray, "T"] | Failure:
        try:
            text = self.input.conversations.ids(sample.prompt, sample.completion)
        except InputError as error:
            return Failure("template", one_line(str(error)))
        if len(text) > self.longest:
            context = self.input.architecture.max_positions
            limit = "its context" if self.longest == context else "rows under score.reward.max_tokens_per_device"
            return Failure("too long", f"{len(text)} tokens for the reward model, {limit} holds {self.longest}")
        return text


def _outcome(score: float) -> Outcome:
    if math.isfinite(score):
        return Outcome(score)
    return Outcome(failure=Failure("value", f"the reward model's score is {score}"))


class RewardPass(NamedTuple):
    """One pass of the reward model over the samples of a round."""

    cut: Cut
    num_compilations: int


def asking_metrics(asked: Sequence[RewardPass]) -> dict[str, float]:
    """Of all its passes of a step; none without a reward model."""
    if not asked:
        return {}
    compilations = sum(one.num_compilations for one in asked)
    return {
        **scoring_metrics("reward", [one.cut for one in asked]),
        "perf/score_reward_compilations": compilations,
    }
