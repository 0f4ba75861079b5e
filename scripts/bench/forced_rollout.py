"""Runs rollouts whose samples end with an EOS token at prescribed lengths.

As in training, scheduler and engine know only the maximum length of a sample.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, UInt32

from app.mesh.device_mesh import make_mesh
from app.model.decode_weights import DecodeConversion, DecodeWeights
from app.model.decoder import DecoderDefinition
from app.model.io.families import architecture_from_config
from app.model.io.hf_weights import load_weights
from app.model.io.model_files import open_model
from app.records.sample import Prompt
from app.rollout.engine.engine import SlotEngine
from app.rollout.engine.programs import ProgramSpec, SlotPrograms
from app.rollout.engine.sample_generator import SampleGenerator
from app.rollout.engine.segment import SegmentDecoder
from app.rollout.engine.shapes import SlotShapes, make_slot_shapes
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import (
    SampledTokens,
    Sampler,
    SamplingRules,
    hash_uids,
    sample_key,
    sample_tokens,
)
from app.rollout.scheduling.protocol import WorkerKind
from app.rollout.workers.worker import RolloutWorker
from app.rollout.workers.worker_pool import RolloutWorkerPool, ScheduleConfig
from scripts.bench.shapes import QWEN2_5
from settings.schema.mesh import MeshSettings
from settings.schema.rollout import PdsrSettings, SegmentSettings

POLICY_VERSION = 0
EOS = 0
RULES = SamplingRules(1.0)
PROMPT_LENGTHS = (48, 96)
LONGEST_OVER_MEAN = 4
"""Maximum length of samples with log-normal lengths, divided by their mean length."""


def random_prompts(count: int, *, vocab_size: int) -> list[Prompt]:
    rng = np.random.default_rng(1)
    ids = [rng.integers(1, vocab_size, rng.integers(*PROMPT_LENGTHS)).astype(np.int32) for _ in range(count)]
    return [Prompt(f"prompt-{i}", token_ids, "", None) for i, token_ids in enumerate(ids)]


def last_keys(prompts: Sequence[Prompt], lengths: Sequence[int], *, seed: int) -> UInt32[np.ndarray, "N 2"]:
    """Returns the PRNG key with which the last token of each sample is drawn, so that it can be recognized."""
    of_sample = [prompts[i * len(prompts) // len(lengths)] for i in range(len(lengths))]
    group_size = len(lengths) // len(prompts)
    words = jnp.asarray(hash_uids([prompt.uid for prompt in of_sample]))
    indices = jnp.arange(len(lengths)) % group_size
    keys = jax.vmap(sample_key, in_axes=(None, None, 0, 0))(jnp.int32(seed), jnp.int32(POLICY_VERSION), words, indices)
    positions = np.asarray([len(prompt.token_ids) for prompt in of_sample]) + np.asarray(lengths) - 1
    return np.asarray(jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, positions)))


def ending_draw(ends: UInt32[np.ndarray, "N 2"]) -> Sampler:
    """Returns a sampler like `sample_tokens` that returns EOS for the PRNG keys `ends`, and never otherwise."""

    def sampler(logits: Array, rules: SamplingRules, keys: Array) -> SampledTokens:
        drawn = sample_tokens(logits, rules, keys)
        is_last = jnp.any(jnp.all(jax.random.key_data(keys)[:, None] == ends, axis=-1), axis=-1)
        token_ids = jnp.where(drawn.token_ids == EOS, EOS + 1, drawn.token_ids)
        return drawn._replace(token_ids=jnp.where(is_last, EOS, token_ids))

    return sampler


class EndingPrograms(SlotPrograms):
    """Slot programs whose decode programs use `sampler`; see `ending_draw`."""

    sampler: Sampler

    def _decode_program(self, rows: int, *, truncates: bool) -> ProgramSpec:
        _, arguments, options = super()._decode_program(rows, truncates=truncates)
        decoder = SegmentDecoder(self.definition, self.sampler, self.shapes.segment_max, None, self.num_route_words)
        return decoder.decode_segment, arguments, options


@dataclass
class ForcedRollout:
    """A model, its prompts and the prescribed lengths of their samples.

    Args:
        lengths: tokens of all samples for the seeds 0, 1, ...; with other seeds, all samples have `longest` tokens.
        longest: maximum length of a sample, which scheduler and engine know.
        slots: number of slots of each worker. The first is fast, the others are heavy, and all share one device.
        fast_length: maximum row length of the fast worker, including the prompt (`rollout.workers.fast.max_length`).
    """

    model: str
    prompts: list[Prompt]
    lengths: list[list[int]]
    longest: int
    slots: tuple[int, ...]
    definition: DecoderDefinition
    mesh: Mesh
    weights: DecodeWeights
    rule: SegmentSettings
    dtype: jnp.dtype
    fast_length: int | None = None
    pdsr: PdsrSettings = field(default_factory=PdsrSettings)
    engines: list[SlotEngine] = field(default_factory=list)
    _programs: dict[SlotShapes, EndingPrograms] = field(default_factory=dict)

    @property
    def group_size(self) -> int:
        return len(self.lengths[0]) // len(self.prompts)

    def new_engine(self, num_slots: int, *, num_blocks: int | None = None, row_limit: int | None = None) -> SlotEngine:
        """Returns a new engine; engines with the same shapes share compiled programs."""
        shapes = make_slot_shapes(
            num_slots,
            max_prompt_length=PROMPT_LENGTHS[1],
            max_new_tokens=self.longest,
            prefill_length_min=32,
            segment_max=min(self.rule.max, self.longest),
            exact=False,
            num_blocks=num_blocks,
        )._replace(row_limit=row_limit)
        if shapes not in self._programs:
            programs = EndingPrograms(self.definition, self.mesh, shapes, dtype=self.dtype, num_eos=1)
            ends = [last_keys(self.prompts, lengths, seed=seed) for seed, lengths in enumerate(self.lengths)]
            programs.sampler = ending_draw(np.concatenate(ends))
            self._programs[shapes] = programs
        programs = self._programs[shapes]
        return SlotEngine(
            self.definition, self.mesh, shapes, eos_ids=[EOS], dtype=self.dtype, exact=False, programs=programs
        )

    def compile(self) -> float:
        """Compiles the programs of all workers and returns the seconds that this took."""
        start = time.perf_counter()
        fast, *heavy = self.slots
        self.engines = [self.new_engine(fast, row_limit=self.fast_length), *map(self.new_engine, heavy)]
        for engine in self.engines:
            engine.programs.compile(suspends=True, recomputes=True, truncates=False)
        return time.perf_counter() - start

    def workers(
        self, policy: str, *, rule: SegmentSettings | None = None, num_workers: int | None = None
    ) -> RolloutWorkerPool:
        """Returns new workers, which know no sample lengths of earlier rollouts."""
        kinds: list[WorkerKind] = ["heavy" if i else "fast" for i in range(len(self.engines))]
        workers = [
            RolloutWorker(f"{kind}-{i}", kind, engine, device="0")
            for i, (kind, engine) in enumerate(zip(kinds, self.engines, strict=True))
        ]
        schedule = ScheduleConfig(policy, self.pdsr, rule or self.rule, in_order=True)
        return RolloutWorkerPool(workers[:num_workers], schedule, decode_text=lambda _: "", stop_text=lambda _: "")

    def generate(self, made: SampleGenerator, *, seed: int = 0) -> float:
        """Generates all samples and returns the seconds of the whole call, from prompts to samples."""
        start = time.perf_counter()
        samples = made.generate(
            self.weights,
            self.prompts,
            GenerationRequest(
                group_size=self.group_size,
                max_new_tokens=self.longest,
                rules=RULES,
                seed=seed,
                policy_version=POLICY_VERSION,
            ),
        )
        seconds = time.perf_counter() - start
        assert [len(sample.completion_ids) for sample in samples] == self.lengths[seed]
        return seconds


def log_normal_lengths(num_samples: int, *, group: int, mean: int, sigma: float, longest: int) -> list[int]:
    """Returns log-normal lengths in tokens, at most `longest`; their logarithms have correlation 0.5 within a group."""
    rng = np.random.default_rng(0)
    shared, own = rng.standard_normal((num_samples // group, 1)), rng.standard_normal((num_samples // group, group))
    logs = np.sqrt(0.5) * shared + np.sqrt(0.5) * own
    lengths = np.rint(mean * np.exp(sigma * logs - sigma**2 / 2))
    return np.clip(lengths, 1, longest).astype(int).ravel().tolist()


def open_rollout(
    model: str,
    *,
    num_prompts: int,
    lengths: Sequence[list[int]],
    longest: int,
    slots: Sequence[int],
    rule: SegmentSettings,
    dtype: str = "float32",
) -> ForcedRollout:
    """Loads a model and makes random prompts for a rollout; compiles nothing.

    Args:
        model: value of `model.path`, or a key of `shapes.QWEN2_5` for random weights of that model's sizes.
    """
    mesh = make_mesh(MeshSettings())
    files = None if model in QWEN2_5 else open_model(model)
    definition = DecoderDefinition.create(architecture_from_config(files.config if files else QWEN2_5[model]))
    params = load_weights(definition, files.weights, mesh) if files else definition.initialise(0)
    with jax.set_mesh(mesh):
        weights = DecodeConversion(definition, mesh, jnp.dtype(dtype))(params)
    prompts = random_prompts(num_prompts, vocab_size=definition.architecture.vocab_size)
    return ForcedRollout(
        *(Path(model).name, prompts, list(lengths), longest, tuple(slots)),
        *(definition, mesh, weights, rule, jnp.dtype(dtype)),
    )


def positive(text: str) -> int:
    """Parses a positive integer, for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def several(text: str) -> int:
    """Parses an integer above 1, for argparse."""
    if positive(text) == 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 1, got {text!r}")
    return int(text)


def machine() -> dict[str, Any]:
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "jax": jax.__version__,
    }
