"""Prepares a model on a mesh for generation and scoring, for all commands that run a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax.numpy as jnp
from jax.sharding import Mesh

from app.distributed.collectives import gather_json_over_hosts
from app.distributed.stop_check import StopCheck
from app.mesh.device_mesh import host_submesh
from app.mesh.devices import device_platform, local_devices
from app.mesh.placement import bytes_per_device
from app.model.decode_weights import DecodeConversion, DecodeWeights
from app.model.lora import merge_adapters
from app.records.text_format import format_ranges
from app.rollout.counters import RolloutCounters
from app.rollout.engine.continuous_batching import ContinuousBatchGenerator
from app.rollout.engine.shapes import Footprint
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.scheduling.length_estimator import LearnedLengths
from app.rollout.scheduling.schedule_metrics import ScheduleMetrics
from app.rollout.workers.async_generation import AsyncRollout
from app.rollout.workers.worker_pool import RolloutWorkerPool
from app.runtime.environments import open_conversations
from app.runtime.generators import open_continuous_batching, open_workers
from app.runtime.model_spec import ModelSpec
from app.runtime.rollout_mesh import rollout_mesh, rollout_mesh_notes
from app.runtime.scoring import ScoringSession
from app.runtime.slot_choice import slots_note
from settings import Settings

Generator = ContinuousBatchGenerator | RolloutWorkerPool

MIN_TURNED_DIM = 512
"""Minimum model dim for which CPUs store kernels with output dims first to generate; smaller kernels stay in cache."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A model on a mesh that generates and scores samples."""

    scoring: ScoringSession
    """The mesh, the model and the scorers, including the critic's if there is a critic."""
    generates: Literal["rollouts", "evaluations"] | None
    """`rollouts` for rollouts and evaluations, `evaluations` for evaluations only; None = nothing is generated."""
    to_decode_weights: DecodeConversion
    """Converts the policy's weights for generation: for this host's devices or, with `rollout.placement: global`, for
    all devices of the mesh."""
    continuous_batching: ContinuousBatchGenerator | None = None
    """Generator with decode slots; None if only workers generate, or nothing does."""
    workers: RolloutWorkerPool | None = None
    """Workers that generate in place of the slots; None if the settings use no workers."""
    generation_notes: tuple[str, ...] = ()
    """Notes for users about the mesh of generation and the chosen numbers of slots and KV blocks."""

    @classmethod
    def open(
        cls,
        scoring: ScoringSession,
        *,
        generates: Literal["rollouts", "evaluations"] | None = "rollouts",
        held_bytes: int = 0,
    ) -> Session:
        """Opens the decode slots or workers that the settings choose. All hosts must call it together.

        Workers that generate during training are always busy; slots are then also opened, for evaluations.

        Args:
            generates: see `Session.generates`; with None, the settings of generation are not used.
            held_bytes: bytes per device of other arrays that stay there during generation.

        Raises:
            InputError: the slots or workers do not fit the devices.
        """
        settings, mesh = scoring.settings, scoring.mesh
        conversion = _decode_conversion(scoring, generates=generates is not None)
        if generates is None:
            return cls(scoring=scoring, generates=None, to_decode_weights=conversion)
        given = settings, scoring.model_spec.tokenizer, conversion
        is_async, slots, workers = settings.rollout.max_staleness > 0, None, None
        if generates == "rollouts" or not is_async:
            workers = open_workers(*given, devices=scoring.generation_devices or range(len(local_devices())))
            if is_async and workers and not scoring.generation_devices:
                held_bytes += bytes_per_device(_worker_footprint(scoring, conversion, workers))
        if workers is None or is_async:
            rules = eval_sampling_rules(settings) if is_async else sampling_rules(settings)
            slots = open_continuous_batching(*given, held_bytes=held_bytes, truncates=rules.truncates)
        for generator in (slots, workers):
            if generator is not None:
                generator.conversations = open_conversations(settings, scoring.model_spec.tokenizer)
        devices_note = []
        if numbers := scoring.generation_devices:
            of_host = f"of the {len(local_devices())} devices of each host, {format_ranges(numbers)} generate"
            devices_note = [f"rollout.devices: {of_host} and the others train"]
        notes = (
            *devices_note,
            *rollout_mesh_notes(settings, mesh, conversion.mesh_of_all_hosts, conversion.definition),
            *(slots_note(settings, slots.engine.programs) if slots else ()),
        )
        return cls(
            scoring=scoring,
            generates=generates,
            to_decode_weights=conversion,
            continuous_batching=slots,
            workers=workers,
            generation_notes=notes,
        )

    @property
    def settings(self) -> Settings:
        return self.scoring.settings

    @property
    def model_spec(self) -> ModelSpec:
        return self.scoring.model_spec

    @property
    def mesh(self) -> Mesh:
        """The mesh of training and scoring, over all hosts."""
        return self.scoring.mesh

    def close(self) -> None:
        """Ends the processes of workers and environments."""
        for generator in self._generators:
            if generator.conversations is not None:
                generator.conversations.pool.close()
        if self.workers is not None:
            self.workers.shut_down()

    def stop_when(self, should_stop: StopCheck) -> None:
        """Makes generation raise `StoppedError` after the segment in which `should_stop` becomes true."""
        for generator in self._generators:
            generator.stop_requested = should_stop

    @property
    def _generators(self) -> list[Generator]:
        return [one for one in (self.continuous_batching, self.workers) if one is not None]

    @property
    def generator(self) -> Generator:
        """The generator of rollouts: the workers if there are any, otherwise the decode slots."""
        generator = self.workers or self.continuous_batching
        assert generator is not None, "this session generates nothing"
        return generator

    @property
    def evaluation_generator(self) -> Generator:
        """The generator of evaluations: the decode slots if there are any, otherwise the workers."""
        return self.continuous_batching or self.generator

    def compile_rollout(self) -> None:
        self.generator.compile(sampling_rules(self.settings))

    def compile_evaluation(self) -> None:
        self.evaluation_generator.compile(eval_sampling_rules(self.settings))

    @property
    def generates_async(self) -> bool:
        """Whether generation runs during training, so that the workers are always busy."""
        return self.settings.rollout.max_staleness > 0 and self.workers is not None

    def open_async_generation(self, weights: DecodeWeights, *, policy_version: int) -> AsyncRollout:
        """Starts asynchronous rollouts, which run during training under `rollout.*`."""
        assert self.workers is not None
        return AsyncRollout(self.workers, weights, self.rollout_request(policy_version=policy_version))

    def rollout_request(self, *, policy_version: int = 0, first_group_id: int = 0) -> GenerationRequest:
        """Returns the request for generating a round of samples under `rollout.*`.

        Args:
            policy_version: the training step of the weights, on which the random numbers of sampling depend.
            first_group_id: the group id of the first prompt.
        """
        return GenerationRequest(
            rules=sampling_rules(self.settings),
            seed=self.settings.run.seed,
            policy_version=policy_version,
            group_size=self.settings.rollout.group_size,
            max_new_tokens=self.settings.rollout.max_new_tokens,
            stop=self.settings.rollout.stop,
            first_group_id=first_group_id,
            route_shape=self.scoring.route_shape,
        )

    def evaluation_request(self) -> GenerationRequest:
        """Returns the request for generating the samples of an evaluation under `eval.*`."""
        request, group_size = self.rollout_request(), self.settings.eval.num_samples
        rules = eval_sampling_rules(self.settings)
        return replace(request, rules=rules, group_size=group_size, route_shape=None, is_evaluation=True)

    def take_counters(self) -> RolloutCounters:
        """Returns the counters of generation since the last call."""
        return self.generator.take_counters() if self.generates else RolloutCounters()

    def share_lengths(self) -> LearnedLengths | None:
        """Merges the hosts' statistics of sample lengths and returns the result; None without a scheduler.

        All hosts must call it together at the end of a step, so that a resumed run schedules the next step as an
        uninterrupted run would. An asynchronous rollout that is running is not affected.
        """
        if self.workers is None:
            return None
        of_hosts = gather_json_over_hosts(self.workers.new_lengths.to_json())
        self.workers.share_lengths(map(LearnedLengths.from_json, of_hosts))
        return self.workers.shared_lengths

    def take_schedule_metrics(self) -> list[ScheduleMetrics]:
        """Returns the schedule metrics of the rollouts since the last call; empty without a scheduler."""
        return self.workers.take_schedule_metrics() if self.workers else []

    def footprint(self, generator: Generator) -> Footprint:
        """Returns the shapes of the weights and caches that a generator keeps on the devices."""
        if self.workers is None or generator is not self.workers:
            return generator.footprint()
        return _worker_footprint(self.scoring, self.to_decode_weights, self.workers)


def _decode_conversion(scoring: ScoringSession, *, generates: bool) -> DecodeConversion:
    settings, model, mesh = scoring.settings, scoring.model_spec, scoring.mesh
    dtype, lora = jnp.dtype(settings.model.dtype), model.policy_definition.lora
    decoder = model.decode_definition(dtype, settings.rollout.weights if generates else None)
    is_large = decoder.architecture.model_dim >= MIN_TURNED_DIM and decoder.quantization is None
    if is_large and device_platform(mesh.devices.flat[0]) == "cpu":
        decoder = decoder.with_outputs_first()
    of_all_hosts = rollout_mesh(settings, mesh, decoder) if generates else mesh
    return DecodeConversion(
        decoder,
        of_all_hosts if settings.rollout.placement == "global" else host_submesh(of_all_hosts),
        dtype,
        mesh_of_all_hosts=of_all_hosts,
        training_mesh=mesh,
        merge=None if decoder.lora == lora else partial(merge_adapters, lora=lora),
    )


def _worker_footprint(scoring: ScoringSession, conversion: DecodeConversion, workers: RolloutWorkerPool) -> Footprint:
    """Returns the shapes of the weights and caches that workers keep on the devices of this process."""
    rollout = scoring.settings.rollout
    if rollout.uses_ray:
        # The caches are on the devices of the actors.
        footprint = Footprint(conversion.abstract_weights, ())
    else:
        footprint = workers.footprint()
        if scoring.mesh.size > 1 and not scoring.generation_devices:
            # Workers hold copies of weights that are also on the whole mesh.
            footprint = footprint._replace(weights=(conversion.abstract_weights, footprint.weights))
    # Asynchronous workers receive new weights before dropping the old ones.
    return footprint._replace(weights=(footprint.weights,) * 2) if rollout.max_staleness > 0 else footprint


def sampling_rules(settings: Settings) -> SamplingRules:
    """Returns the sampling rules of `rollout.*`: temperature, top-k, top-p and min-p."""
    rollout = settings.rollout
    return SamplingRules(rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p)


def eval_sampling_rules(settings: Settings) -> SamplingRules:
    """Returns the sampling rules of evaluations: `eval.temperature`, without top-k, top-p and min-p."""
    return SamplingRules(settings.eval.temperature)
