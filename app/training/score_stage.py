"""The scoring passes of a step: the logprobs and values that its updates need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from app.batching.micro_batcher import MicroBatcher
from app.batching.packing_metrics import scoring_batching_metrics
from app.checkpoint.network_states import RunState
from app.mesh.placement import to_device_memory
from app.mesh.program_cache import CompilationCounter
from app.model.decoder import Params
from app.records.sample import Sample
from app.runtime.scoring import ScoringSession
from app.tracking.timer import StepTimer
from settings.schema.algorithm import ScoredRole


@dataclass(frozen=True)
class ScoreStage:
    """Scores the samples of a step in every role that its algorithm needs."""

    session: ScoringSession
    batchers: Mapping[ScoredRole, MicroBatcher]
    reference_params: Params | None
    """Reference weights, maybe in host memory; None, and no memory, if `algorithm.beta` is 0."""

    def __call__(
        self, state: RunState, samples: list[Sample], mini_batches: Sequence[np.ndarray], timer: StepTimer
    ) -> tuple[list[Sample], dict[str, float]]:
        """Returns the samples with their logprobs and values, and the metrics of the passes.

        Each mini-batch of the first epoch is scored by itself: with equal quotas the update has the same rows.

        Args:
            mini_batches: the indices of the samples in each of them.
        """
        metrics: dict[str, float] = {}
        for role, batcher in self.batchers.items():
            plans, scored = [], dict[int, Sample]()
            with timer.phase(f"score_{role}"), closing(CompilationCounter()) as compilations:
                weights = self._params_for_role(role, state)
                for part in mini_batches:
                    mini_batch = [samples[i] for i in part]
                    mini_batch, plan = self.session.score(weights, mini_batch, role, batcher=batcher)
                    scored |= zip(part.tolist(), mini_batch, strict=True)
                    plans.append(plan)
                del weights
            samples = [scored[i] for i in range(len(samples))]
            metrics |= {
                **scoring_batching_metrics(role, plans, seconds=timer.seconds[f"time/score_{role}_s"]),
                f"perf/score_{role}_compilations": compilations.take_count(),
            }
        return samples, metrics

    def _params_for_role(self, role: ScoredRole, state: RunState) -> Params:
        """Returns the weights that score for a role, on the devices."""
        if role == "reference":
            return to_device_memory(self.reference_params)
        if role == "policy":
            return self.session.full_params(state.policy.params)
        assert state.critic is not None
        return state.critic.params
