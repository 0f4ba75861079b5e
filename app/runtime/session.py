"""What every verb that runs a model shares: the mesh, the decoder, its tokenizer, its compiled rooms."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jax.sharding import Mesh

from app.distributed.cancellation import StopCheck
from app.distributed.collectives import gather_bytes_over_hosts
from app.mesh.submesh import host_submesh
from app.model.kv_cache import DecodeWeights
from app.model.lora import merge_adapters
from app.records.sample import Prompt, Sample
from app.rollout.async_generation import AsyncRollout
from app.rollout.batch_engine import BatchEngine, BatchShape, Footprint
from app.rollout.continuous_batching import ContinuousBatchGenerator
from app.rollout.counters import RolloutCounters
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.metrics import ScheduleMetrics
from app.rollout.worker_pool import RolloutWorkerPool
from app.runtime.generators import open_continuous_batching, open_workers
from app.runtime.mesh_checks import check_decode_layout
from app.runtime.model_spec import CriticSpec, ModelSpec
from app.runtime.ray_workers import check_ray_installed
from app.runtime.scoring import ScoringSession, open_scorers
from settings import Settings


@dataclass(kw_only=True)
class Session(ScoringSession):
    """A model on a mesh, with its engine and scorer, and its critic where it has one."""

    engine: BatchEngine
    """Makes the weights that anything here generates with. On this host's island of the mesh, or on all of it, as
    `rollout.placement` says."""
    continuous_batching: ContinuousBatchGenerator | None = None
    """Generates instead of the engine where `rollout.slots` is set."""
    workers: RolloutWorkerPool | None = None
    """Generate instead of both where `rollout.scheduler` is set."""

    @classmethod
    def open(
        cls, settings: Settings, model: ModelSpec, critic: CriticSpec | None = None, *, generates: bool = True
    ) -> Session:
        """The first thing that touches a device. `topology.start` must have run.

        Args:
            generates: False where samples are only read: slots and workers need not be possible then.
        """
        if generates:
            check_ray_installed(settings)
        scoring = open_scorers(settings, model, critic)
        mesh: Mesh = scoring["mesh"]
        if generates:
            check_decode_layout(settings, mesh)
        dtype, lora = jnp.dtype(settings.model.dtype), model.policy_definition.lora
        decoder = model.decode_definition(dtype)
        generates_on = mesh if settings.rollout.placement == "global" else host_submesh(mesh)
        engine = BatchEngine(
            decoder,
            generates_on,
            training_mesh=mesh,
            eos_ids=model.tokenizer.eos_ids,
            decode_text=model.tokenizer.decode,
            dtype=dtype,
            prefill_length_min=settings.rollout.prefill_length_min,
            max_length_total=settings.rollout.max_length_total,
            decode_layout=settings.rollout.decode_layout,
            merge_adapters=None if decoder is model.policy_definition else partial(merge_adapters, lora=lora),
        )
        session = cls(**scoring, engine=engine)
        if generates:
            session.continuous_batching = open_continuous_batching(
                settings, decoder, model.tokenizer, generates_on, dtype=dtype
            )
            session.workers = open_workers(settings, decoder, model.tokenizer, mesh, dtype=dtype)
        return session

    def close(self) -> None:
        """Ends what it has started beyond this process."""
        if self.workers is not None:
            self.workers.shut_down()

    def sample(
        self,
        weights: DecodeWeights,
        prompts: Sequence[Prompt],
        *,
        policy_version: int,
        first_group_id: int = 0,
    ) -> list[Sample]:
        """A rollout under `rollout.*`."""
        return self.generate(
            weights,
            prompts,
            group_size=self.settings.rollout.group_size,
            sampling_params=self.sampling_params,
            policy_version=policy_version,
            first_group_id=first_group_id,
        )

    def stream(
        self, weights: DecodeWeights, prompts: Sequence[Prompt], *, group_size: int, sampling_params: SamplingRules
    ) -> Iterator[Sample]:
        """Any number of prompts through slots or workers, one sample after the other."""
        assert self.continuous_generator is not None
        return self.continuous_generator.stream(
            weights,
            prompts,
            group_size=group_size,
            max_new_tokens=self.settings.rollout.max_new_tokens,
            rules=sampling_params,
            seed=self.settings.run.seed,
            policy_version=0,
        )

    def stop_when(self, should_stop: StopCheck) -> None:
        """Generation raises `StoppedError` at the next edge of a segment after this process was asked to stop."""
        for generator in (self.engine, self.continuous_batching, self.workers):
            if generator is not None:
                generator.stop_requested = should_stop

    @property
    def continuous_generator(self) -> ContinuousBatchGenerator | RolloutWorkerPool | None:
        """What takes any number of samples at once, if there is such a thing."""
        return self.workers or self.continuous_batching

    def compile_rollout(self) -> None:
        """All that slots or workers will run, where there are any, and nothing else compiles in a rollout."""
        if self.continuous_generator is not None:
            self.continuous_generator.compile(self.sampling_params)

    def compile_evaluation(self) -> None:
        """The same of an evaluation."""
        if self.continuous_generator is not None and not self.evaluates_in_batches:
            self.continuous_generator.compile(self.eval_sampling_params)

    @property
    def generates_async(self) -> bool:
        """Whether generation goes on while others train: the workers are taken all the time."""
        return self.settings.rollout.max_staleness > 0 and self.workers is not None

    @property
    def evaluates_in_batches(self) -> bool:
        """Whether an evaluation is as many batches as it takes, and not one queue of all its prompts.

        So it is beside workers that run ahead; there it may round otherwise than their slots do, in the last bits.
        """
        return self.continuous_generator is None or self.generates_async

    @property
    def _generator(self) -> ContinuousBatchGenerator | RolloutWorkerPool | BatchEngine:
        return self.continuous_generator if self.continuous_generator and not self.generates_async else self.engine

    def open_async_generation(self, weights: DecodeWeights, *, policy_version: int) -> AsyncRollout:
        """Rollouts under `rollout.*` that go on while others train."""
        assert self.workers is not None
        rollout = self.settings.rollout
        return AsyncRollout(
            self.workers,
            weights,
            group_size=rollout.group_size,
            max_new_tokens=rollout.max_new_tokens,
            rules=self.sampling_params,
            seed=self.settings.run.seed,
            policy_version=policy_version,
        )

    @property
    def sampling_params(self) -> SamplingRules:
        """Those of `rollout.*`."""
        rollout = self.settings.rollout
        return SamplingRules(rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p)

    @property
    def eval_sampling_params(self) -> SamplingRules:
        """Nothing is cut off: an evaluation tells what the model itself does."""
        return SamplingRules(self.settings.eval.temperature)

    def generate(
        self,
        weights: DecodeWeights,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling_params: SamplingRules,
        policy_version: int,
        first_group_id: int = 0,
    ) -> list[Sample]:
        """Through workers or slots where there are any and they are free, else in one batch to the end."""
        return self._generator.generate(
            weights,
            prompts,
            group_size=group_size,
            max_new_tokens=self.settings.rollout.max_new_tokens,
            rules=sampling_params,
            seed=self.settings.run.seed,
            policy_version=policy_version,
            first_group_id=first_group_id,
        )

    def take_counters(self) -> RolloutCounters:
        """Of what was generated since the last call."""
        return self.continuous_generator.take_counters() if self.continuous_generator else self.engine.counters.take()

    def sync_length_history(self) -> Mapping[str, float] | None:
        """Prompt -> mean length of its samples on any host: what the next are scheduled by. None without a schedule.

        All hosts call it at the end of a step, so that the next one is scheduled alike in a run that goes on and in one
        that is resumed. A rollout that is open goes on with what it has learned itself.
        """
        if self.workers is None:
            return None
        news = json.dumps(self.workers.take_length_updates()).encode()
        for told in map(json.loads, gather_bytes_over_hosts(news)):
            self.workers.length_history = {**self.workers.length_history, **told}
        return self.workers.length_history

    def take_schedule_metrics(self) -> list[ScheduleMetrics]:
        """How good the schedules were since the last call; nothing where nothing is scheduled."""
        return self.workers.take_schedule_metrics() if self.workers else []

    def rollout_shape(self, *, num_prompts: int, group_size: int, longest_prompt: int) -> BatchShape:
        """In which a rollout generates from so many prompts of this host."""
        if self.continuous_generator:
            return self.continuous_generator.batch_shape
        return self._batch_shape(num_prompts, group_size=group_size, longest_prompt=longest_prompt)

    def evaluation_shape(self, *, num_prompts: int, longest_prompt: int) -> BatchShape:
        """In which an evaluation does."""
        if self.continuous_generator and not self.generates_async:
            return self.continuous_generator.batch_shape
        return self._batch_shape(num_prompts, group_size=self.settings.eval.num_samples, longest_prompt=longest_prompt)

    def _batch_shape(self, num_prompts: int, *, group_size: int, longest_prompt: int) -> BatchShape:
        return self.engine.batch_shape(
            num_prompts=num_prompts,
            group_size=group_size,
            longest_prompt=longest_prompt,
            max_new_tokens=self.settings.rollout.max_new_tokens,
        )

    def evaluation_footprint(self, shape: BatchShape) -> Footprint:
        """What an evaluation in such a shape holds on the devices, beside workers that run ahead."""
        return self.engine.footprint(shape) if self.generates_async else self.rollout_footprint(shape)

    def rollout_footprint(self, shape: BatchShape) -> Footprint:
        """What a rollout in such a shape holds on the devices."""
        whole = self.engine.footprint(shape)
        if self.continuous_generator is None:
            return whole
        if self.settings.rollout.pool == "ray":
            # The caches are elsewhere.
            return whole._replace(prompts=(), slots=())
        found = self.continuous_generator.footprint()
        # Islands hold copies of the weights that lie on the whole mesh.
        has_copies = self.workers is not None and self.mesh.size > 1
        return found._replace(weights=(whole.weights, found.weights)) if has_copies else found
