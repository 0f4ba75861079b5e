"""Asynchronous generation on the workers of several hosts under one scheduler.

All hosts submit the same rounds, each with its own prompts, which become one round on host 0. Each host publishes
weights to its own workers only; a token's version says which of them drew it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

import jax

from app.model.decode_weights import DecodeWeights
from app.records.sample import Prompt, Sample
from app.records.step_timeline import SegmentTime
from app.rollout.hosts.shared_pool import SchedulingPool, ServingPool
from app.rollout.request import GenerationRequest
from app.rollout.sequence import RolloutSequence
from app.rollout.workers.async_generation import AsyncRollout, samples_of_round
from app.rollout.workers.worker_pool import RolloutWorkerPool


class SchedulingRollout(AsyncRollout):
    """The open rollout of host 0. A round starts once all hosts have submitted it."""

    def __init__(self, workers: SchedulingPool, weights: DecodeWeights, request: GenerationRequest):
        self._peers, self._pool = workers.peers, workers
        self._rounds_of_host: list[deque[Sequence[RolloutSequence]]] = [deque() for _ in range(len(self._peers) + 1)]
        """Rounds that other hosts have not submitted yet: of this host, and of the others."""
        super().__init__(workers, weights, request)
        for peer in self._peers:
            peer.on_submitted = self._wake
        # A host may have submitted a round meanwhile.
        self._wake()

    def _wake(self) -> None:
        self._inbox.put(())
        self._executor.wake()

    def _add_round(self, rows: Sequence[RolloutSequence]) -> None:
        own, *others = self._rounds_of_host
        own.extend([rows] if rows else [])
        for peer, rounds in zip(self._peers, others, strict=True):
            rounds.extend(peer.take_rounds())
        while own and all(rounds or peer.has_left for peer, rounds in zip(self._peers, others, strict=True)):
            taken = [rounds.popleft() for rounds in self._rounds_of_host if rounds]
            self._rounds.submit([row for of_host in taken for row in of_host])

    def _fail(self, error: BaseException) -> None:
        self._pool.end_on_other_hosts(error)
        super()._fail(error)


class ServingRollout:
    """The part of another host than host 0 in an open rollout, with the interface of `AsyncRollout`."""

    def __init__(self, workers: ServingPool, weights: DecodeWeights, request: GenerationRequest):
        self._workers = workers
        self._request = request
        self._rounds: deque[range] = deque()
        """Numbers of the rows of each uncollected round."""
        with ExitStack() as stack:
            self._service = stack.enter_context(workers.open_service(weights, request))
            self._exit_stack = stack.pop_all()

    def submit(self, prompts: Sequence[Prompt], *, noise_step: int) -> None:
        """Adds the next round; see `AsyncRollout.submit`."""
        rows = self._workers.make_rows(prompts, self._request, noise_step=noise_step)
        self._workers.check_fits(rows)
        self._rounds.append(self._service.submit(rows))

    def publish(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Sets the weights for all segments started here from now on."""
        jax.block_until_ready(weights)
        self._service.publish(weights, policy_version=policy_version)

    def collect_round(self, *, first_group_id: int = 0) -> list[Sample]:
        """Waits for the oldest uncollected round of this host; raises what `WorkerService.wait_for_row` does."""
        rows = [self._service.wait_for_row(number) for number in self._rounds.popleft()]
        return samples_of_round(self._workers, rows, self._request, first_group_id=first_group_id)

    @property
    def num_ready(self) -> int:
        """Number of rounds of this host that are complete and not yet collected."""
        return sum(map(self._service.is_done, self._rounds))

    def take_segments(self, *, since: float) -> list[SegmentTime]:
        """Returns nothing: host 0 has the segments of all workers."""
        return []

    def close(self) -> None:
        """Leaves the rollout after the running segments. Uncollected rounds are lost."""
        self._exit_stack.close()


AsyncGeneration = AsyncRollout | ServingRollout


def open_async_generation(
    workers: RolloutWorkerPool, weights: DecodeWeights, request: GenerationRequest
) -> AsyncGeneration:
    """Opens a rollout that runs during training; all hosts that share a scheduler must call it together."""
    match workers:
        case SchedulingPool():
            return SchedulingRollout(workers, weights, request)
        case ServingPool():
            return ServingRollout(workers, weights, request)
        case _:
            return AsyncRollout(workers, weights, request)
