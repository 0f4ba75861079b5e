"""Places a model on a mesh and scores samples with it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from app.batching.micro_batcher import GlobalPlan, MicroBatcher
from app.batching.sample_exchange import READ_BY_SCORING, fetch_rows
from app.distributed.collectives import use_first_devices
from app.mesh import device_mesh, placement
from app.mesh.device_mesh import generation_devices
from app.mesh.devices import local_devices
from app.model.architecture import Architecture, RouteShape
from app.model.attention.packed import platform_blocking
from app.model.decoder import DecoderDefinition, Params
from app.model.io.hf_weights import critic_tensors, load_weights
from app.model.lora import combine_params, init_adapters
from app.model.quantization import check_qwix_installed
from app.records.sample import Sample
from app.runtime.mesh_checks import check_experts, check_tp_divides_heads
from app.runtime.model_spec import ModelSpec, NetworkSpec
from app.score.scorer import PackedForward, Scorer, ValueScorer, append_dummy_token
from settings import Settings
from settings.schema.algorithm import ScoredRole
from settings.schema.mesh import MeshSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CriticModel:
    """The critic of a session, and its scorer on the session's mesh."""

    spec: NetworkSpec
    valuer: ValueScorer

    def load_params(self, mesh: Mesh) -> Params:
        """Loads the critic's initial weights in float32, sharded over the mesh."""
        definition, source = self.spec.definition, self.spec.files.weights
        return load_weights(definition, source, mesh, entries=critic_tensors(definition, source.shapes))


@dataclass(kw_only=True)
class ScoringSession:
    """A model on a mesh with its scorers, and the critic of the run if there is one."""

    settings: Settings
    model_spec: ModelSpec
    mesh: Mesh
    """The mesh of training and scoring, over all hosts."""
    scorer: Scorer
    """Scores with the policy, including its adapters if it has any."""
    reference_scorer: Scorer
    """Scores with the network of the teacher or, without a teacher, of the policy without adapters."""
    critic: CriticModel | None = None
    teacher: NetworkSpec | None = None
    """The model of `reference.path`; None if it is not used."""
    generation_devices: tuple[int, ...] = ()
    """Indices of this host's devices that only generate; empty if all belong to the mesh."""

    @classmethod
    def open(
        cls,
        settings: Settings,
        model: ModelSpec,
        critic: NetworkSpec | None = None,
        teacher: NetworkSpec | None = None,
        *,
        trains: bool = False,
    ) -> ScoringSession:
        """Opens the mesh, checks that it fits the networks, and creates their scorers.

        This starts the devices: call `jax_startup.initialize_distributed` first.

        Args:
            trains: whether the session is for training, so that its mesh excludes the devices of `rollout.devices`.
        """
        set_aside = devices_set_aside(settings) if trains else ()
        use_first_devices(bool(set_aside))
        if model.policy_definition.quantization is not None:
            check_qwix_installed()
        mesh = open_mesh(settings, set_aside=set_aside)
        for check in (check_tp_divides_heads, check_experts):
            check(mesh, model.architecture, path=settings.model.path)
            if critic is not None:
                check(mesh, critic.architecture, path=settings.critic.path or settings.model.path)
            if teacher is not None:
                check(mesh, teacher.architecture, path=teacher.files.name)
        dtype = set_compute_dtype(settings)
        make_scorer = partial(Scorer, mesh=mesh, dtype=dtype, logits_chunk=settings.model.logits_chunk)
        of_policy = partial(make_scorer, replays_routes=settings.rollout.routing_replay)
        reference_scorer = scorer = of_policy(model.policy_definition)
        if teacher is not None:
            reference_scorer = make_scorer(teacher.definition)
        elif model.policy_definition.lora is not None:
            reference_scorer = of_policy(model.reference_definition)
        return cls(
            settings=settings,
            model_spec=model,
            mesh=mesh,
            scorer=scorer,
            reference_scorer=reference_scorer,
            teacher=teacher,
            critic=critic and CriticModel(critic, ValueScorer(critic.definition, mesh, dtype=dtype)),
            generation_devices=set_aside,
        )

    def architecture_of(self, role: ScoredRole) -> Architecture:
        """Returns the architecture of the network that a role scores with."""
        others = {"critic": self.critic and self.critic.spec, "reference": self.teacher}
        return (others.get(role) or self.model_spec).architecture

    @property
    def has_own_reference(self) -> bool:
        """Whether the reference has its own weights: without a teacher, adapters share the policy's frozen weights."""
        return self.teacher is not None or self.model_spec.policy_definition.lora is None

    @property
    def reference_definition(self) -> DecoderDefinition:
        """Definition of the teacher or, without a teacher, of the policy without its adapters."""
        return self.model_spec.reference_definition if self.teacher is None else self.teacher.definition

    @property
    def held_reference(self) -> DecoderDefinition:
        """Definition of the reference as kept in memory: in the compute dtype, since its weights are not trained."""
        return self.reference_definition.held_in(jnp.dtype(self.settings.model.dtype))

    def load_params(self) -> Params:
        """Loads the weights of `model.path`, sharded over the mesh and quantized if training quantizes them."""
        return load_weights(self.model_spec.reference_definition, self.model_spec.files.weights, self.mesh)

    def load_reference(self) -> Params:
        """Loads the weights of the teacher or, without a teacher, of `model.path`, in the dtype of `held_reference`."""
        return load_weights(self.held_reference, (self.teacher or self.model_spec).files.weights, self.mesh)

    @property
    def route_shape(self) -> RouteShape | None:
        """Shape of the expert choices recorded for a token; None unless `rollout.routing_replay` is set."""
        return self.model_spec.architecture.route_shape if self.settings.rollout.routing_replay else None

    @cached_property
    def frozen_params(self) -> Params:
        """The policy's frozen weights; empty if all weights are trained.

        They are loaded on first access, which all hosts must make together.
        """
        return {} if self.model_spec.policy_definition.lora is None else self.load_params()

    def free_frozen_params(self) -> None:
        """Drops the cached `frozen_params`; the next access loads them again."""
        vars(self).pop("frozen_params", None)

    def full_params(self, trained_params: Params) -> Params:
        """Returns all weights of the policy: `trained_params` combined with the frozen weights."""
        return combine_params(trained_params, self.frozen_params)

    def initial_trained_params(self) -> Params:
        """Returns the trained weights before training: of `model.path`, or adapters that do not change its outputs."""
        definition = self.model_spec.policy_definition
        if definition.lora is None:
            return self.load_params()
        shapes, shardings = map(definition.trainable, (definition.shapes, definition.shardings(self.mesh)))
        return init_adapters(shapes, shardings, seed=self.settings.run.seed)

    def score(
        self, params: Params, samples: Sequence[Sample], role: ScoredRole, *, batcher: MicroBatcher
    ) -> tuple[list[Sample], GlobalPlan]:
        """Returns the samples with the logprobs or values of a role added, and the micro-batch plan.

        Args:
            params: the weights of the role's network.
        """
        inputs, scorer, field = samples, self.scorer, f"{role}_logprobs"
        if role == "reference":
            scorer = self.reference_scorer
        elif role == "critic":
            assert self.critic is not None
            scorer, field = self.critic.valuer, "values"
            if self.settings.algorithm.bootstrap_truncated:
                # For the value after a truncated sample.
                inputs = [append_dummy_token(s) if s.finish_reason == "length" else s for s in samples]
        how = {"is_scanned": self.settings.score.is_scanned(role), "temperature": self.settings.rollout.temperature}
        scored, plan = score_samples(scorer, params, inputs, batcher=batcher, **how)
        return [replace(sample, **{field: x}) for sample, x in zip(samples, scored, strict=True)], plan


def score_samples(
    scorer: PackedForward,
    params: Params,
    samples: Sequence[Sample],
    *,
    batcher: MicroBatcher,
    is_scanned: bool,
    temperature: float = 1.0,
) -> tuple[list[Float32[np.ndarray, "C"]], GlobalPlan]:
    """Returns the logprobs or values of this host's samples, and the micro-batch plan of all hosts.

    All hosts must call it together.

    Args:
        is_scanned: whether one compiled scan runs all micro-batches.
        temperature: sampling temperature, by which logits are divided.
    """
    plan = batcher(samples, scorer.mesh)
    rows = fetch_rows(samples, plan, READ_BY_SCORING, scorer.route_shape)
    runner = scorer.run_scanned if is_scanned else scorer.run_looped
    found = scorer.per_token(params, rows.samples, rows.plan, temperature=temperature, runner=runner)
    return rows.return_to_owners(found), plan


def devices_set_aside(settings: Settings) -> tuple[int, ...]:
    """Returns the indices of each host's devices that only generate during training.

    Raises:
        InputError: `rollout.devices` does not fit the devices.
    """
    wanted = settings.rollout.devices
    return () if wanted is None else generation_devices(wanted, num_devices=len(local_devices()))


def open_mesh(settings: Settings, *, set_aside: Collection[int] = ()) -> Mesh:
    """Creates the device mesh from `mesh.shape`. Call `jax_startup.initialize_distributed` first.

    If `rollout.devices` is set but `set_aside` is empty, the mesh spans all devices, with the tp of `mesh.shape`.

    Args:
        set_aside: indices, on each host, of devices that are not part of the mesh.

    Raises:
        InputError: the settings do not fit the devices.
    """
    shape_is_of_training = settings.rollout.devices is not None and not set_aside
    of_mesh = _with_shape_of_all_devices(settings.mesh) if shape_is_of_training else settings.mesh
    mesh = device_mesh.make_mesh(of_mesh, set_aside=set_aside)
    with jax.set_mesh(mesh):
        # Raises InputError if `model.attention` is `kernel` and these devices have no kernel for any row length.
        platform_blocking(1, 1, settings.model.dtype, settings.model.attention, group_size=1)
    placement.check_tp_within_hosts(mesh)
    return mesh


def _with_shape_of_all_devices(settings: MeshSettings) -> MeshSettings:
    """Returns the settings with a `mesh.shape` that spans all devices and keeps tp."""
    sizes = settings.shape.split(",")
    if {"auto", "-1"} & {*sizes}:
        return settings
    shape = "auto" if sizes[-1] == "1" else f"1,-1,{sizes[-1]}"
    log.info(
        "mesh.shape: %s is for training, without rollout.devices; here it is %s",
        settings.shape,
        shape,
    )
    return settings.model_copy(update={"shape": shape})


def set_compute_dtype(settings: Settings) -> jnp.dtype:
    """Returns `model.dtype` and sets JAX's matmul precision to match it."""
    dtype = jnp.dtype(settings.model.dtype)
    # By default, GPUs would compute float32 matmuls in TF32, and TPUs in bfloat16 passes.
    jax.config.update("jax_default_matmul_precision", "highest" if dtype == jnp.float32 else None)
    return dtype
