"""Provides the samples of a step in rounds.

A round contains the samples of the next `rollout.prompts_per_step` prompts. `SyncRolloutSource` generates it with the
policy of the step, `AsyncRolloutSource` generates it while earlier steps train, `ReplayRolloutSource` reads it from a
file, and `GivenCompletions` takes it from the data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import jax

from app.distributed.collective_files import host_slice
from app.distributed.collectives import error_barrier
from app.model.decode_weights import DecodeWeights
from app.model.decoder import Params
from app.prompts.curriculum import PassRateOrder
from app.prompts.data_sources import make_prompt_order
from app.prompts.prompt_order import Indices, MixtureOrder, PromptOrder
from app.records.sample import Prompt, Sample
from app.rollout.workers.async_generation import AsyncRollout
from app.runtime.session import Session
from app.training.replay import Replay
from settings import Settings


class RolloutSource(ABC):
    """Base class of the sources of samples. Methods that a source does not override do nothing."""

    num_prompts: int | None = None
    """Number of prompts in an epoch; None for a replay."""
    num_ready = 0
    """Number of complete rounds that were waiting when a step took its first round."""
    curriculum: PassRateOrder | None = None
    """Chooses prompts by the pass rates of earlier steps; None without a curriculum."""

    @abstractmethod
    def take(self, params: Params, *, step: int, position: int, number: int) -> list[Sample]:
        """Returns this host's samples of a round. All hosts must call it together.

        Args:
            params: the weights of the step's policy.
            position: position of the step's first prompt in the global order.
            number: index of the round in its step (0, 1, ...).
        """

    def release_weights(self) -> None:  # noqa: B027
        """Frees the generation weights of the step; called after its last round."""

    def compile(self) -> None:  # noqa: B027
        """Compiles the programs of generation, before the first round."""

    def publish(self, params: Params, *, step: int) -> None:  # noqa: B027
        """Receives the policy's weights after each step, without keeping references to these arrays."""

    def close(self) -> None:  # noqa: B027
        """Ends generation after the last step."""


@dataclass(frozen=True)
class RoundPrompts:
    """Selects this host's prompts of each round."""

    settings: Settings
    prompts: Sequence[Prompt]

    @cached_property
    def order(self) -> PromptOrder | MixtureOrder | PassRateOrder:
        """The global order of prompts; cached, because the order of a curriculum remembers what it has drawn."""
        return make_prompt_order(self.settings.data, self.prompts, seed=self.settings.run.seed)

    def prompts_at(self, position: int) -> list[Prompt]:
        """Returns this host's prompts of the round that starts at `position` in the global order."""
        return [self.prompts[i] for i in self.rows_at(position)]

    def rows_at(self, position: int) -> Indices:
        """Returns the indices into `prompts` of this host's prompts of the round that starts at `position`."""
        indices = self.order.row_indices(position, self.global_prompts_per_round)
        return indices[host_slice(len(indices))]

    @property
    def global_prompts_per_round(self) -> int:
        """Number of prompts in a round on all hosts together."""
        return self.settings.rollout.prompts_per_step * jax.process_count()

    def first_group_id(self, number: int) -> int:
        """Returns this host's first group id in the round with index `number`; all hosts' ids are distinct."""
        return (number * jax.process_count() + jax.process_index()) * self.settings.rollout.prompts_per_step


class GeneratedRounds(RolloutSource):
    """Base class of the sources whose rounds a session generates.

    Args:
        max_rounds: maximum number of rounds per step.
    """

    def __init__(self, session: Session, prompts: RoundPrompts, *, max_rounds: int):
        self._session, self._prompts, self._max_rounds = session, prompts, max_rounds
        self.num_prompts = len(prompts.prompts)

    def compile(self) -> None:
        self._session.compile_rollout()


class SyncRolloutSource(GeneratedRounds):
    """Generates each round when a step asks for it, while training waits."""

    _weights: DecodeWeights | None = None
    """The step's weights for generation; freed after its last round, because rewards may need the memory."""

    def take(self, params: Params, *, step: int, position: int, number: int) -> list[Sample]:
        weights, self._weights = self._weights, None
        if weights is None:
            weights = self._session.to_decode_weights(params)
        first_group_id = self._prompts.first_group_id(number)
        request = self._session.rollout_request(policy_version=step - 1, first_group_id=first_group_id)
        prompts = self._prompts.prompts_at(position + number * self._prompts.global_prompts_per_round)
        samples = self._session.generator.generate(weights, prompts, request)
        # Set only now, because there is no next round if generation was stopped.
        self._weights = weights if number + 1 < self._max_rounds else None
        return samples

    def release_weights(self) -> None:
        self._weights = None


class AsyncRolloutSource(GeneratedRounds):
    """Generates while steps train, at most `rollout.max_staleness` = k steps ahead of them.

    Step v publishes version v of the policy at its end. Then, until step v + 1 takes its first round, at most k + 1
    rounds are pending; afterwards, until step v + 1 ends, at most k. Every step takes at least one round. So a round
    submitted while v is the newest version is used at the latest by step v + k + 1, whose policy has version v + k.

    Source: Fu et al. 2025 (AReaL), eq. 3.
    """

    _generation: AsyncRollout | None = None
    _position = 0
    """Position of the next round to submit in the global order of prompts."""
    _num_waiting = 0
    """Number of submitted rounds that no step has taken yet."""

    @property
    def _max_staleness(self) -> int:
        return self._session.settings.rollout.max_staleness

    def take(self, params: Params, *, step: int, position: int, number: int) -> list[Sample]:
        generation = self._generation or self._start_generation(params, step=step, position=position)
        taken = self._position - self._num_waiting * self._prompts.global_prompts_per_round
        assert taken == position + number * self._prompts.global_prompts_per_round
        if number == 0:
            self.num_ready = generation.num_ready
        samples = generation.collect_round(first_group_id=self._prompts.first_group_id(number))
        self._num_waiting -= 1
        left_in_step = self._max_rounds - number - 1
        self._submit_rounds(generation, self._max_staleness, needed=left_in_step + self._needed_after(step))
        oldest = min(s.policy_version for s in samples)
        assert oldest >= step - 1 - self._max_staleness, f"step {step} took tokens of version {oldest}"
        return samples

    def _start_generation(self, params: Params, *, step: int, position: int) -> AsyncRollout:
        generation = self._generation = self._session.open_async_generation(
            self._session.to_decode_weights(params), policy_version=step - 1
        )
        self._position = position
        self._submit_rounds(generation, self._max_staleness + 1, needed=self._needed_after(step - 1))
        return generation

    def publish(self, params: Params, *, step: int) -> None:
        assert self._generation is not None
        self._generation.publish(self._session.to_decode_weights(params), policy_version=step)
        self._submit_rounds(self._generation, self._max_staleness + 1, needed=self._needed_after(step))

    def _needed_after(self, step: int) -> int:
        return (self._session.settings.run.steps - step) * self._max_rounds

    def _submit_rounds(self, generation: AsyncRollout, max_pending: int, *, needed: int) -> None:
        """Submits rounds until min(`max_pending`, `needed`) rounds are pending."""
        while self._num_waiting < min(max_pending, needed):
            number = self._position // self._prompts.global_prompts_per_round
            generation.submit(self._prompts.prompts_at(self._position), noise_step=number)
            self._position += self._prompts.global_prompts_per_round
            self._num_waiting += 1

    def close(self) -> None:
        if self._generation is not None:
            self._generation.close()


class ReplayRolloutSource(RolloutSource):
    """Reads the only round of each step from the step's file.

    Each host takes an equal, contiguous part of the file's groups.
    """

    def __init__(self, replay: Replay, *, num_groups: int):
        self._replay = replay
        self._num_groups = num_groups

    def take(self, params: Params, *, step: int, position: int, number: int) -> list[Sample]:
        assert number == 0
        with error_barrier():
            groups = self._replay.load_groups(step)
        first = jax.process_index() * self._num_groups
        return [sample for group in groups[first : first + self._num_groups] for sample in group]


class GivenCompletions(RolloutSource):
    """Takes the samples of each step from the completions in the data, in the usual order of prompts."""

    def __init__(self, settings: Settings, samples: Sequence[Sample]) -> None:
        self._samples = samples
        self._prompts = RoundPrompts(settings, [sample.prompt for sample in samples])
        self.num_prompts = len(samples)

    def take(self, params: Params, *, step: int, position: int, number: int) -> list[Sample]:
        first = self._prompts.first_group_id(number)
        rows = self._prompts.rows_at(position)
        # A row that occurs twice in a step makes two groups.
        return [replace(self._samples[row], group_id=first + i) for i, row in enumerate(rows.tolist())]


def make_rollout_source(
    session: Session, prompts: Sequence[Prompt], *, max_rounds: int, pass_rates: Mapping[str, float] | None = None
) -> RolloutSource:
    """Returns an asynchronous source if `rollout.max_staleness` is above 0, otherwise a synchronous source.

    Args:
        max_rounds: maximum number of rounds per step.
        pass_rates: maps uids of prompts to the pass rates that a resumed run's curriculum has observed.
    """
    round_prompts = RoundPrompts(session.settings, prompts)
    source_class = AsyncRolloutSource if session.generates_async else SyncRolloutSource
    source = source_class(session, round_prompts, max_rounds=max_rounds)
    if isinstance(round_prompts.order, PassRateOrder):
        source.curriculum = round_prompts.order
        source.curriculum.observe((pass_rates or {}).items())
    return source
