"""What every verb that runs a model shares: the mesh, the decoder, its tokenizer, its compiled rooms."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from app.batching.micro_batcher import GlobalPlan, MicroBatcher
from app.distributed.cancellation import StopCheck
from app.distributed.collectives import gather_bytes_over_hosts
from app.mesh import placement, topology
from app.mesh.submesh import host_submesh
from app.model.architecture import Architecture
from app.model.decoder import Params
from app.model.io.hf_weights import critic_tensors, load_weights
from app.model.kv_cache import DecodeWeights
from app.model.lora import combine_params, init_adapters, merge_adapters
from app.model.quantization import check_qwix_installed
from app.records.sample import Prompt, Sample
from app.rollout.async_generation import AsyncRollout
from app.rollout.batch_engine import BatchEngine, BatchShape, Footprint
from app.rollout.continuous_batching import ContinuousBatchGenerator
from app.rollout.counters import RolloutCounters
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.metrics import ScheduleMetrics
from app.rollout.worker_pool import RolloutWorkerPool
from app.runtime.generators import open_continuous_batching, open_workers
from app.runtime.mesh_checks import check_decode_layout, check_tp_divides_heads
from app.runtime.model_spec import CriticSpec, ModelSpec
from app.runtime.ray_workers import check_ray_installed
from app.score.scorer import BatchRunner, PackedForward, Scorer, ValueScorer, append_dummy_token
from settings import Settings
from settings.schema.settings import ScoredRole


@dataclass(frozen=True)
class CriticModel:
    """A value decoder on the mesh of a session."""

    spec: CriticSpec
    valuer: ValueScorer

    def load_params(self, mesh: Mesh) -> Params:
        """The weights it starts from, float32, on their shardings."""
        definition, source = self.spec.definition, self.spec.files.weights
        return load_weights(definition, source, mesh, entries=critic_tensors(definition, source.shapes))


@dataclass
class Session:
    """A model on a mesh, with its engine and scorer, and its critic where it has one."""

    settings: Settings
    model_spec: ModelSpec
    mesh: Mesh
    """Of training and scoring, over all hosts."""
    engine: BatchEngine
    """Makes the weights that anything here generates with. On this host's island of the mesh, or on all of it, as
    `rollout.placement` says."""
    scorer: Scorer
    """Of the policy, with its adapters where it has any."""
    reference_scorer: Scorer
    """Of the weights of `model.path`, in codes where these are quantized; the policy's own without adapters."""
    critic: CriticModel | None = None
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
        if model.policy_definition.quantization is not None:
            check_qwix_installed()
        mesh = open_mesh(settings)
        check_tp_divides_heads(mesh, model.architecture, path=settings.model.path)
        if critic is not None:
            check_tp_divides_heads(mesh, critic.architecture, path=settings.critic.path or settings.model.path)
        if generates:
            check_decode_layout(settings, mesh)
        dtype, lora = set_compute_dtype(settings), model.policy_definition.lora
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
        score = partial(Scorer, mesh=mesh, dtype=dtype, logits_chunk=settings.model.logits_chunk)
        scorer = reference_scorer = score(model.policy_definition)
        if lora is not None:
            reference_scorer = score(model.reference_definition)
        valuer = None if critic is None else CriticModel(critic, ValueScorer(critic.definition, mesh, dtype=dtype))
        session = cls(settings, model, mesh, engine, scorer, reference_scorer, valuer)
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

    def architecture_of(self, role: ScoredRole) -> Architecture:
        """Of the network that scores for a role."""
        return self.critic.spec.architecture if role == "critic" and self.critic else self.model_spec.architecture

    def load_params(self) -> Params:
        """The weights of `model.path` on their shardings, as training holds them."""
        return load_weights(self.model_spec.reference_definition, self.model_spec.files.weights, self.mesh)

    @cached_property
    def frozen_params(self) -> Params:
        """The policy's weights that stay as they are, and the reference: loaded once, by all hosts at once.

        Empty where all weights learn.
        """
        return {} if self.model_spec.policy_definition.lora is None else self.load_params()

    def free_frozen_params(self) -> None:
        """Frees what `frozen` has loaded, where nobody else has it; whoever asks again loads it again."""
        vars(self).pop("frozen_params", None)

    def full_params(self, trained_params: Params) -> Params:
        """The policy's weights, all of them, of those that learn: what is scored with, decoded with and evaluated."""
        return combine_params(trained_params, self.frozen_params)

    def initial_trained_params(self) -> Params:
        """What the policy's training starts from: the weights of `model.path`, or adapters that change nothing yet."""
        definition = self.model_spec.policy_definition
        if definition.lora is None:
            return self.load_params()
        shapes, shardings = map(definition.trainable, (definition.shapes, definition.shardings(self.mesh)))
        return init_adapters(shapes, shardings, seed=self.settings.run.seed)

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
        self,
        weights: DecodeWeights,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling_params: SamplingRules,
        skipped_uids: Container[str] = (),
    ) -> Iterator[Sample]:
        """Any number of prompts through slots or workers, one sample after the other, but for `skipped_uids`."""
        assert self.continuous_generator is not None
        return self.continuous_generator.stream(
            weights,
            prompts,
            group_size=group_size,
            max_new_tokens=self.settings.rollout.max_new_tokens,
            rules=sampling_params,
            seed=self.settings.run.seed,
            policy_version=0,
            skipped_uids=skipped_uids,
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

    def score(
        self, params: Params, samples: Sequence[Sample], role: ScoredRole, *, batcher: MicroBatcher
    ) -> tuple[list[Sample], GlobalPlan]:
        """The samples with the logprobs or values of the role whose weights these are, and how they were cut for it."""
        if role == "critic":
            return self._score_values(params, samples, batcher=batcher)
        pieces = batcher(samples, self.mesh)
        scorer = self.reference_scorer if role == "reference" else self.scorer
        logprobs = scorer.logprobs(
            params,
            samples,
            pieces.local_plan,
            temperature=self.settings.rollout.temperature,
            runner=self._pass_strategy(scorer, role),
        )
        scored = [replace(s, **{f"{role}_logprobs": x}) for s, x in zip(samples, logprobs, strict=True)]
        return scored, pieces

    def _score_values(
        self, params: Params, samples: Sequence[Sample], *, batcher: MicroBatcher
    ) -> tuple[list[Sample], GlobalPlan]:
        """`values`, with one more behind the samples that go on after their last token."""
        assert self.critic is not None
        goes_on = self.settings.algorithm.bootstrap_truncated
        read = [append_dummy_token(s) if goes_on and s.finish_reason == "length" else s for s in samples]
        pieces = batcher(read, self.mesh)
        valuer = self.critic.valuer
        values = valuer.values(params, read, pieces.local_plan, runner=self._pass_strategy(valuer, "critic"))
        return [replace(s, values=x) for s, x in zip(samples, values, strict=True)], pieces

    def _pass_strategy(self, scorer: PackedForward, role: ScoredRole) -> BatchRunner:
        return scorer.run_scanned if self.settings.score.for_role(role).strategy == "scan" else scorer.run_looped


def open_mesh(settings: Settings) -> Mesh:
    """The mesh of `mesh.shape`. `topology.start` must have run."""
    mesh = topology.make_mesh(settings.mesh)
    placement.check_rows_per_host(mesh)
    return mesh


def set_compute_dtype(settings: Settings) -> jnp.dtype:
    """`model.dtype`, with products as exact from here on as it says."""
    dtype = jnp.dtype(settings.model.dtype)
    # float32 means float32: by default GPUs take TF32 and TPUs bfloat16 passes for its products.
    jax.config.update("jax_default_matmul_precision", "highest" if dtype == jnp.float32 else None)
    return dtype
