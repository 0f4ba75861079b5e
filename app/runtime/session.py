"""What every verb that runs a model shares: the mesh, the decoder, its tokenizer, its compiled rooms."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from app.batching.micro_batcher import Cut, Cutter
from app.distributed.cancellation import AskedToStop
from app.distributed.collectives import bytes_over_hosts
from app.mesh import placement, topology
from app.mesh.submesh import host_island
from app.model.architecture import Architecture
from app.model.decoder import Params
from app.model.io.hf_weights import critic_entries, load_weights
from app.model.kv_cache import DecodeWeights
from app.model.lora import fresh_adapters, joined, merged
from app.model.quantization import check_is_installed
from app.records.sample import Prompt, Sample
from app.rollout.async_generation import Generation
from app.rollout.batch_engine import BatchShape, Engine, Footprint
from app.rollout.continuous_batching import ContinuousBatching
from app.rollout.counters import Tally
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.metrics import Figures
from app.rollout.worker_pool import ScheduledWorkers
from app.runtime.generators import open_slots, open_workers
from app.runtime.mesh_checks import check_decode_layout, check_heads
from app.runtime.model_spec import CriticInput, ModelInput
from app.runtime.ray_workers import check_ray_is_there
from app.score.scorer import Pass, RowPass, Scorer, Valuer, with_a_token_behind
from settings import Settings
from settings.schema.settings import ScoredRole


@dataclass(frozen=True)
class Critic:
    """A value decoder on the mesh of a session."""

    input: CriticInput
    valuer: Valuer

    def load_params(self, mesh: Mesh) -> Params:
        """The weights it starts from, float32, on their shardings."""
        definition, source = self.input.definition, self.input.files.weights
        return load_weights(definition, source, mesh, entries=critic_entries(definition, source.shapes))


@dataclass
class Session:
    """A model on a mesh, with its engine and scorer, and its critic where it has one."""

    settings: Settings
    input: ModelInput
    mesh: Mesh
    """Of training and scoring, over all hosts."""
    engine: Engine
    """Makes the weights that anything here generates with. On this host's island of the mesh, or on all of it, as
    `rollout.placement` says."""
    scorer: Scorer
    """Of the policy, with its adapters where it has any."""
    reference_scorer: Scorer
    """Of the weights of `model.path`, in codes where these are quantized; the policy's own without adapters."""
    critic: Critic | None = None
    slots: ContinuousBatching | None = None
    """Generates instead of the engine where `rollout.slots` is set."""
    workers: ScheduledWorkers | None = None
    """Generate instead of both where `rollout.scheduler` is set."""

    @classmethod
    def open(
        cls, settings: Settings, model: ModelInput, critic: CriticInput | None = None, *, generates: bool = True
    ) -> Session:
        """The first thing that touches a device. `topology.start` must have run.

        Args:
            generates: False where samples are only read: slots and workers need not be possible then.
        """
        if generates:
            check_ray_is_there(settings)
        if model.adapted.quantization is not None:
            check_is_installed()
        mesh = open_mesh(settings)
        check_heads(mesh, model.architecture, path=settings.model.path)
        if critic is not None:
            check_heads(mesh, critic.architecture, path=settings.critic.path or settings.model.path)
        if generates:
            check_decode_layout(settings, mesh)
        dtype, lora = compute_type(settings), model.adapted.lora
        decoder = model.decoded(dtype)
        generates_on = mesh if settings.rollout.placement == "global" else host_island(mesh)
        engine = Engine(
            decoder,
            generates_on,
            trained_on=mesh,
            eos_ids=model.tokenizer.eos_ids,
            decode_text=model.tokenizer.decode,
            dtype=dtype,
            prefill_length_min=settings.rollout.prefill_length_min,
            max_length_total=settings.rollout.max_length_total,
            decode_layout=settings.rollout.decode_layout,
            merge=None if decoder is model.adapted else partial(merged, lora=lora),
        )
        score = partial(Scorer, mesh=mesh, dtype=dtype, logits_chunk=settings.model.logits_chunk)
        scorer = reference_scorer = score(model.adapted)
        if lora is not None:
            reference_scorer = score(model.reference)
        valuer = None if critic is None else Critic(critic, Valuer(critic.definition, mesh, dtype=dtype))
        session = cls(settings, model, mesh, engine, scorer, reference_scorer, valuer)
        if generates:
            session.slots = open_slots(settings, decoder, model.tokenizer, generates_on, dtype=dtype)
            session.workers = open_workers(settings, decoder, model.tokenizer, mesh, dtype=dtype)
        return session

    def close(self) -> None:
        """Ends what it has started beyond this process."""
        if self.workers is not None:
            self.workers.shut_down()

    def architecture_of(self, role: ScoredRole) -> Architecture:
        """Of the network that scores for a role."""
        return self.critic.input.architecture if role == "critic" and self.critic else self.input.architecture

    def load_params(self) -> Params:
        """The weights of `model.path` on their shardings, as training holds them."""
        return load_weights(self.input.reference, self.input.files.weights, self.mesh)

    @cached_property
    def frozen(self) -> Params:
        """The policy's weights that stay as they are, and the reference: loaded once, by all hosts at once.

        Empty where all weights learn.
        """
        return {} if self.input.adapted.lora is None else self.load_params()

    def drop_frozen(self) -> None:
        """Frees what `frozen` has loaded, where nobody else has it; whoever asks again loads it again."""
        vars(self).pop("frozen", None)

    def whole(self, trained: Params) -> Params:
        """The policy's weights, all of them, of those that learn: what is scored with, decoded with and evaluated."""
        return joined(trained, self.frozen)

    def untrained(self) -> Params:
        """What the policy's training starts from: the weights of `model.path`, or adapters that change nothing yet."""
        definition = self.input.adapted
        if definition.lora is None:
            return self.load_params()
        shapes, shardings = map(definition.trained, (definition.shapes, definition.shardings(self.mesh)))
        return fresh_adapters(shapes, shardings, seed=self.settings.run.seed)

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
            rules=self.rules,
            policy_version=policy_version,
            first_group_id=first_group_id,
        )

    def stream(
        self, weights: DecodeWeights, prompts: Sequence[Prompt], *, group_size: int, rules: SamplingRules
    ) -> Iterator[Sample]:
        """Any number of prompts through slots or workers, one sample after the other."""
        assert self.queue is not None
        return self.queue.stream(
            weights,
            prompts,
            group_size=group_size,
            max_new_tokens=self.settings.rollout.max_new_tokens,
            rules=rules,
            seed=self.settings.run.seed,
            policy_version=0,
        )

    def stop_when(self, asked: AskedToStop) -> None:
        """Generation raises `StoppedError` at the next edge of a segment after this process was asked to stop."""
        for generator in (self.engine, self.slots, self.workers):
            if generator is not None:
                generator.asked_to_stop = asked

    @property
    def queue(self) -> ContinuousBatching | ScheduledWorkers | None:
        """What takes any number of samples at once, if there is such a thing."""
        return self.workers or self.slots

    def compile_rollout(self) -> None:
        """All that slots or workers will run, where there are any, and nothing else compiles in a rollout."""
        if self.queue is not None:
            self.queue.compile(self.rules)

    def compile_evaluation(self) -> None:
        """The same of an evaluation."""
        if self.queue is not None and not self.evaluates_in_batches:
            self.queue.compile(self.evaluation_rules)

    @property
    def runs_ahead(self) -> bool:
        """Whether generation goes on while others train: the workers are taken all the time."""
        return self.settings.rollout.max_staleness > 0 and self.workers is not None

    @property
    def evaluates_in_batches(self) -> bool:
        """Whether an evaluation is as many batches as it takes, and not one queue of all its prompts.

        So it is beside workers that run ahead; there it may round otherwise than their slots do, in the last bits.
        """
        return self.queue is None or self.runs_ahead

    @property
    def _generator(self) -> ContinuousBatching | ScheduledWorkers | Engine:
        return self.queue if self.queue and not self.runs_ahead else self.engine

    def open_generation(self, weights: DecodeWeights, *, policy_version: int) -> Generation:
        """Rollouts under `rollout.*` that go on while others train."""
        assert self.workers is not None
        rollout = self.settings.rollout
        return Generation(
            self.workers,
            weights,
            group_size=rollout.group_size,
            max_new_tokens=rollout.max_new_tokens,
            rules=self.rules,
            seed=self.settings.run.seed,
            policy_version=policy_version,
        )

    @property
    def rules(self) -> SamplingRules:
        """Those of `rollout.*`."""
        rollout = self.settings.rollout
        return SamplingRules(rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p)

    @property
    def evaluation_rules(self) -> SamplingRules:
        """Nothing is cut off: an evaluation tells what the model itself does."""
        return SamplingRules(self.settings.eval.temperature)

    def generate(
        self,
        weights: DecodeWeights,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        rules: SamplingRules,
        policy_version: int,
        first_group_id: int = 0,
    ) -> list[Sample]:
        """Through workers or slots where there are any and they are free, else in one batch to the end."""
        return self._generator.generate(
            weights,
            prompts,
            group_size=group_size,
            max_new_tokens=self.settings.rollout.max_new_tokens,
            rules=rules,
            seed=self.settings.run.seed,
            policy_version=policy_version,
            first_group_id=first_group_id,
        )

    def take_tally(self) -> Tally:
        """Of what was generated since the last call."""
        return self.queue.take_tally() if self.queue else self.engine.tally.take()

    def share_lengths(self) -> Mapping[str, float] | None:
        """Prompt -> mean length of its samples on any host: what the next are scheduled by. None without a schedule.

        All hosts call it at the end of a step, so that the next one is scheduled alike in a run that goes on and in one
        that is resumed. A rollout that is open goes on with what it has learned itself.
        """
        if self.workers is None:
            return None
        news = json.dumps(self.workers.take_news()).encode()
        for told in map(json.loads, bytes_over_hosts(news)):
            self.workers.history = {**self.workers.history, **told}
        return self.workers.history

    def take_figures(self) -> list[Figures]:
        """How good the schedules were since the last call; nothing where nothing is scheduled."""
        return self.workers.take_figures() if self.workers else []

    def rollout_shape(self, *, num_prompts: int, group_size: int, longest_prompt: int) -> BatchShape:
        """In which a rollout generates from so many prompts of this host."""
        if self.queue:
            return self.queue.batch_shape
        return self._batch_shape(num_prompts, group_size=group_size, longest_prompt=longest_prompt)

    def evaluation_shape(self, *, num_prompts: int, longest_prompt: int) -> BatchShape:
        """In which an evaluation does."""
        if self.queue and not self.runs_ahead:
            return self.queue.batch_shape
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
        return self.engine.footprint(shape) if self.runs_ahead else self.rollout_footprint(shape)

    def rollout_footprint(self, shape: BatchShape) -> Footprint:
        """What a rollout in such a shape holds on the devices."""
        whole = self.engine.footprint(shape)
        if self.queue is None:
            return whole
        if self.settings.rollout.pool == "ray":
            # The caches are elsewhere.
            return whole._replace(prompts=(), slots=())
        found = self.queue.footprint()
        # Islands hold copies of the weights that lie on the whole mesh.
        has_copies = self.workers is not None and self.mesh.size > 1
        return found._replace(weights=(whole.weights, found.weights)) if has_copies else found

    def score(
        self, params: Params, samples: Sequence[Sample], role: ScoredRole, *, cut: Cutter
    ) -> tuple[list[Sample], Cut]:
        """The samples with the logprobs or values of the role whose weights these are, and how they were cut for it."""
        if role == "critic":
            return self._values(params, samples, cut=cut)
        pieces = cut(samples, self.mesh)
        scorer = self.reference_scorer if role == "reference" else self.scorer
        logprobs = scorer.logprobs(
            params,
            samples,
            pieces.own,
            temperature=self.settings.rollout.temperature,
            run=self._run_of(scorer, role),
        )
        scored = [replace(s, **{f"{role}_logprobs": x}) for s, x in zip(samples, logprobs, strict=True)]
        return scored, pieces

    def _values(self, params: Params, samples: Sequence[Sample], *, cut: Cutter) -> tuple[list[Sample], Cut]:
        """`values`, with one more behind the samples that go on after their last token."""
        assert self.critic is not None
        goes_on = self.settings.algorithm.bootstrap_truncated
        read = [with_a_token_behind(s) if goes_on and s.finish_reason == "length" else s for s in samples]
        pieces = cut(read, self.mesh)
        valuer = self.critic.valuer
        values = valuer.values(params, read, pieces.own, run=self._run_of(valuer, "critic"))
        return [replace(s, values=x) for s, x in zip(samples, values, strict=True)], pieces

    def _run_of(self, rows: RowPass, role: ScoredRole) -> Pass:
        return rows.scanned if self.settings.score.of(role).strategy == "scan" else rows.one_by_one


def open_mesh(settings: Settings) -> Mesh:
    """The mesh of `mesh.shape`. `topology.start` must have run."""
    mesh = topology.make_mesh(settings.mesh)
    placement.check_rows_per_host(mesh)
    return mesh


def compute_type(settings: Settings) -> jnp.dtype:
    """`model.dtype`, with products as exact from here on as it says."""
    dtype = jnp.dtype(settings.model.dtype)
    # float32 means float32: by default GPUs take TF32 and TPUs bfloat16 passes for its products.
    jax.config.update("jax_default_matmul_precision", "highest" if dtype == jnp.float32 else None)
    return dtype
