"""Checks a run's reward model before any device work, loads it, and scores samples with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32

from app.batching.micro_batcher import FixedRowBatcher, GlobalPlan, PackedRowBatcher
from app.model.architecture import Architecture
from app.model.decoder import Params
from app.model.io.families import SEQUENCE_CLASSIFICATION
from app.model.io.hf_weights import VALUE_HEAD, check_tensors, expected_tensors, load_weights
from app.plugins.values import Failure, one_line
from app.prompts.reward_model_encoder import ConversationEncoder
from app.records.sample import Prompt, Sample
from app.reward.aggregate import RewardOutcome
from app.runtime.mesh_checks import check_experts
from app.runtime.micro_batching import MaxLengths, make_score_batcher
from app.runtime.model_spec import ModelSpec, NetworkSpec, model_setting_in_errors, open_value_network
from app.runtime.scoring import score_samples, set_compute_dtype
from app.score.scorer import ValueScorer, reward_model_inputs
from settings import Settings
from settings.errors import InputError


@dataclass(frozen=True)
class RewardModelSpec(NetworkSpec):
    """The checked files of a reward model, and the encoder of the conversations that it scores."""

    conversations: ConversationEncoder

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises InputError if the model's chat template cannot encode this prompt."""
        with model_setting_in_errors("reward.model"):
            self.conversations.encode(prompt, completion="")


def reward_model_notes(reward_model: RewardModelSpec | None, policy: ModelSpec) -> tuple[str, ...]:
    """Returns a note if the tokenizers of reward model and policy differ; empty otherwise."""
    if reward_model is None:
        return ()
    if reward_model.conversations.encoding_fingerprint == policy.tokenizer.encoding_fingerprint:
        return ()
    return (
        f"reward.model: the tokenizer of {reward_model.files.name} differs from that of {policy.files.name}, so it "
        "reads "
        "completions as text, without the policy's control tokens",
    )


def read_reward_model_spec(settings: Settings) -> RewardModelSpec | None:
    """Reads the model of `reward.model`; returns None if it is not set.

    Raises:
        InputError: the model cannot be used; found here rather than later on the device.
    """
    if settings.reward.model is None:
        return None
    with model_setting_in_errors("reward.model"):
        heads = SEQUENCE_CLASSIFICATION
        network = open_value_network(settings.reward.model, settings, heads=heads, config_only=False)
        files, architecture = network.files, network.architecture
        shape = files.weights.shapes.get(VALUE_HEAD)
        if shape is not None and len(shape) == 2 and shape[0] != 1:
            raise InputError(
                f"model.path: {files.name} has {shape[0]} labels ({VALUE_HEAD} is {shape}, expected "
                f"{(1, architecture.model_dim)}); choose a reward model with one label (num_labels: 1)"
            )
        check_tensors(expected_tensors(network.definition), files.weights.shapes, architecture)
        return RewardModelSpec(**vars(network), conversations=ConversationEncoder(files, settings.data))


def make_reward_batcher(settings: Settings, architecture: Architecture) -> FixedRowBatcher | PackedRowBatcher:
    """Returns the reward model's batcher: its rows fit the longest conversation that context and token quota allow."""
    # The score is read at an additional token after the last one.
    longest = architecture.max_positions + 1
    quota = settings.score.reward.max_tokens_per_device
    lengths = MaxLengths(min(longest, quota or longest), MaxLengths.from_settings(settings).group)
    return make_score_batcher(settings, "reward", architecture, lengths)


@dataclass(frozen=True)
class RewardModel:
    """A loaded reward model on a mesh."""

    spec: RewardModelSpec
    mesh: Mesh
    valuer: ValueScorer
    params: Params
    batcher: FixedRowBatcher | PackedRowBatcher
    uses_scan: bool
    """Whether one compiled scan runs all micro-batches; if not, each is dispatched separately."""

    @classmethod
    def load(cls, settings: Settings, model: RewardModelSpec, mesh: Mesh) -> RewardModel:
        """Loads the weights in `model.dtype`, the compute dtype, sharded over the mesh.

        Raises:
            InputError: tp does not divide the model's experts.
        """
        dtype = set_compute_dtype(settings)
        check_experts(mesh, model.architecture, path=model.files.name)
        return cls(
            model,
            mesh,
            ValueScorer(model.definition, mesh, dtype=dtype),
            load_weights(model.definition.held_in(dtype), model.files.weights, mesh),
            make_reward_batcher(settings, model.architecture),
            uses_scan=settings.score.is_scanned("reward"),
        )

    @property
    def max_conversation_length(self) -> int:
        """Maximum number of tokens in a conversation that can be scored."""
        context = self.spec.architecture.max_positions
        return (
            min(context, self.batcher.budget.row_length - 1) if isinstance(self.batcher, PackedRowBatcher) else context
        )

    def score(self, samples: Sequence[Sample]) -> tuple[list[RewardOutcome], GlobalPlan]:
        """Returns each local sample's score or failure, and the micro-batches. All hosts must call it together."""
        texts = [self._conversation_ids(sample) for sample in samples]
        readable = [(s, text) for s, text in zip(samples, texts, strict=True) if not isinstance(text, Failure)]
        conversations = reward_model_inputs([s for s, _ in readable], [text for _, text in readable])
        how = {"batcher": self.batcher, "is_scanned": self.uses_scan}
        found, pieces = score_samples(self.valuer, self.params, conversations, **how)
        values, outcomes = iter(found), []
        for text in texts:
            score = math.nan if isinstance(text, Failure) else float(next(values)[-1])
            failure = text if isinstance(text, Failure) else Failure("value", f"the reward model's score is {score}")
            outcomes.append(RewardOutcome(score) if math.isfinite(score) else RewardOutcome(failure=failure))
        return outcomes, pieces

    def _conversation_ids(self, sample: Sample) -> Int32[np.ndarray, "T"] | Failure:
        try:
            text = self.spec.conversations.encode(sample.prompt, sample.completion)
        except InputError as error:
            return Failure("template", one_line(str(error)))
        if len(text) > self.max_conversation_length:
            context = self.spec.architecture.max_positions
            limit = (
                "the reward model's context"
                if self.max_conversation_length == context
                else "a row under score.reward.max_tokens_per_device"
            )
            return Failure("too long", f"{len(text)} tokens, but {limit} holds only {self.max_conversation_length}")
        return text
