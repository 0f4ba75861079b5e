"""`grpo score`: adds the logprobs or values of one role to every sample of a file, for one or several checkpoints."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, replace
from functools import partial
from itertools import compress
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import numpy as np

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan, PackedRow, RowShape, bucketed_row_shape
from app.batching.micro_batcher import (
    EqualShapeBatcher,
    FixedRowBatcher,
    GlobalPlan,
    PackedRowBatcher,
    sequence_lengths,
)
from app.distributed.collective_files import host_slice, write_collectively
from app.distributed.collectives import (
    error_barrier,
    is_process_0,
    iterate_in_lockstep,
    max_over_hosts,
    sum_over_hosts,
)
from app.distributed.host_consistency import check_hosts_agree
from app.mesh.devices import peak_memory_bytes
from app.mesh.placement import (
    abstract_arrays,
    check_host_memory,
    num_local_row_shards,
    to_device_memory,
    to_host_memory,
)
from app.mesh.program_cache import CompilationCounter
from app.model.architecture import Architecture
from app.model.decoder import Params
from app.prompts.tokenizer import Tokenizer
from app.records.jsonl import check_output_path, to_json_line
from app.records.sample import Sample
from app.records.sample_json import TOKEN_IDS, LocatedSample
from app.runtime.host_supervision import PhaseCallback, iterate_in_phase, join_hosts
from app.runtime.micro_batching import MaxLengths, make_score_batcher, num_bootstrap_tokens
from app.runtime.model_spec import ModelSpec, NetworkSpec, read_critic_spec, read_model_spec, read_reference_spec
from app.runtime.scoring import ScoringSession
from app.stages.sample_reader import WINDOW_SAMPLES, SampleFileExtent, SampleReader, file_digest
from app.stages.sample_text import SampleEncoder
from settings import Resolved, Settings
from settings.errors import InputError
from settings.loading.fields import value_of
from settings.schema.algorithm import ScoredRole

NUM_CHECKED_SAMPLES = 3
"""Number of samples that `--check-packing` packs into one row."""
TOLERANCES = {"float32": (1e-4, 1e-4), "bfloat16": (0.5, 0.05)}
"""Maps a compute dtype to the allowed maximum and mean difference, in nats. Rounding causes smaller differences, a leak
between samples far larger ones."""

MAX_SAMPLE_TOKENS = 128
"""Maximum number of tokens compared per sample: three such samples make a row long enough for block-wise attention."""


class SavedNetworks(Protocol):
    """The methods of `PolicyCheckpoint` that scoring calls; a protocol avoids importing Orbax without a checkpoint."""

    def describe(self) -> str: ...
    def check_compatible(self, model: ModelSpec, *, needs_tokenizer: bool) -> None: ...
    def check_critic(self, critic: NetworkSpec, *, is_required: bool) -> None: ...
    def restore_params(self, layout: Params, *, network: Literal["policy", "critic"] = "policy") -> Params: ...


def score_tokens(
    resolved: Resolved,
    *,
    input: Path,
    outputs: Mapping[Path, SavedNetworks | None],
    role: ScoredRole,
    checks_packing: bool = False,
) -> list[dict[str, Any]] | None:
    """Adds a role's logprobs or values to every sample of `input`, and returns the metrics of each output to print.

    The file is read once to check every line before any device work, and then once for each output, window by window.
    Shapes depend only on the longest sample of the file and the model's context, so that all checkpoints share the
    compiled programs. Set `rollout.temperature` to the temperature of the sampler. Each host scores a part of every
    window; only process 0 writes the files and returns metrics.

    Args:
        outputs: output file -> checkpoint with the weights of the policy or the critic; None = the models' own weights.
        checks_packing: whether to check first that samples packed into one row do not affect each other's logprobs.

    Raises:
        InputError: the settings, model, checkpoint, samples or output file cannot be used.
        RuntimeError: samples in the same row affect each other's scores.
    """
    settings = resolved.settings
    with error_barrier():
        for out in outputs if is_process_0() else ():
            check_output_path(out, "--out")
        if checks_packing and role == "critic":
            raise InputError("--check-packing compares logprobs, but --role critic has none; use --role policy")
        checkpoints = [one for one in outputs.values() if one is not None]
        model = read_model_spec(settings, generates=False)
        if not checkpoints:
            model = model.without_adapters
        critic = read_critic_spec(settings, model) if role == "critic" else None
        teacher = read_reference_spec(settings, model) if role == "reference" and settings.reference.path else None
        for checkpoint in checkpoints:
            checkpoint.check_compatible(model, needs_tokenizer=False)
            if critic is not None:
                checkpoint.check_critic(critic, is_required=True)
        architecture = (critic or teacher or model).architecture
        encoder = SampleEncoder(lambda: model.tokenizer, settings.data)
        replays = settings.rollout.routing_replay and critic is None and teacher is None
        file = SampleReader(input, architecture, encoder, replays_routes=replays)
        extent = file.check()
        longest, quota = extent.max_length + num_bootstrap_tokens(settings, role), f"score.{role}.max_tokens_per_device"
        if (most := value_of(settings, quota)) is not None and longest > most:
            raise InputError(
                f"{extent.longest_location}: the longest sample has {longest} tokens, more than {quota} = {most} "
                f"(from {resolved.origin(quota)}), but samples are not split; raise it to {longest} or more, or set "
                f"score.{role}.rows_per_device instead"
            )
    with join_hosts(settings, out=next(iter(outputs))) as entered:
        facts = dict[str, str]()
        if jax.process_count() > 1:
            read = [one.files for one in (model, critic, teacher) if one is not None]
            facts = {"--input": file_digest(input)} | {f"the files of {one.name}": one.fingerprint for one in read}
            facts["--checkpoint"] = "; ".join(one.describe() for one in checkpoints)
            # Each host encodes the texts of the input.
            if isinstance(encoder.tokenizer, Tokenizer):
                facts["the tokenizer"] = encoder.tokenizer.fingerprint
        check_hosts_agree(resolved, facts)
        session = ScoringSession.open(settings, model, critic, teacher)
        micro_batcher = _make_micro_batcher(settings, role, architecture, extent)
        shared = {"session": session, "role": role, "micro_batcher": micro_batcher, "num_samples": extent.num_samples}
        firsts = iterate_in_lockstep(file.windows(NUM_CHECKED_SAMPLES))
        checked = [one.sample for one in next(firsts)] if checks_packing else []
        write = partial(write_scores, **shared, checked=checked, on_phase=entered)
        metrics = [write(out, one, iterate_in_lockstep(file.windows(WINDOW_SAMPLES))) for out, one in outputs.items()]
    return metrics if jax.process_index() == 0 else None


def write_scores(
    out: Path,
    checkpoint: SavedNetworks | None,
    windows: Iterable[Sequence[LocatedSample]],
    *,
    session: ScoringSession,
    role: ScoredRole,
    micro_batcher: FixedRowBatcher | PackedRowBatcher,
    num_samples: int,
    checked: list[Sample],
    on_phase: PhaseCallback,
) -> dict[str, Any]:
    """Writes the windows with their scores to `out`, and returns the metrics. The weights are freed at the end.

    Args:
        checked: samples on which packing is checked before the first window; empty to skip the check.
    """
    on_phase("compile")
    start = time.perf_counter()
    params = jax.block_until_ready(_load_params(session, checkpoint))
    figures: dict[str, Any] = {"samples": num_samples, "loading seconds": round(time.perf_counter() - start, 2)}
    if checked:
        # If the file has fewer samples than the row needs, some are repeated.
        packed = (checked * NUM_CHECKED_SAMPLES)[:NUM_CHECKED_SAMPLES]
        figures["max |packed - alone|"] = check_packing(session, params, packed)
    passes = WindowScorer(session, params, role, micro_batcher=micro_batcher)
    del params
    with closing(CompilationCounter()) as compilations:
        scored = passes.score_windows(windows, num_samples=num_samples)
        write_collectively(out, iterate_in_phase(scored, "score", on_phase))
        figures |= passes.metrics(compilations)
    return {**figures, "written to": str(out)}


def _load_params(session: ScoringSession, checkpoint: SavedNetworks | None) -> Params:
    if checkpoint is None and session.critic is not None:
        return session.critic.load_params(session.mesh)
    if checkpoint is None:
        return session.load_params() if session.teacher is None else session.load_reference()
    definition = session.critic.spec.definition if session.critic else session.model_spec.policy_definition
    layout = abstract_arrays(definition.shapes, definition.shardings(session.mesh))
    if session.critic is not None:
        return checkpoint.restore_params(layout, network="critic")
    return session.full_params(checkpoint.restore_params(definition.trainable(layout)))


def _make_micro_batcher(
    settings: Settings, role: ScoredRole, architecture: Architecture, extent: SampleFileExtent
) -> FixedRowBatcher | PackedRowBatcher:
    """Returns a batcher that gives all windows the same row shapes, so that programs are compiled once."""
    batcher = make_score_batcher(settings, role, architecture, MaxLengths(extent.max_length))
    if isinstance(batcher, FixedRowBatcher):
        extra = num_bootstrap_tokens(settings, role)
        return replace(
            batcher, shape=bucketed_row_shape(extent.max_length + extra, extent.max_completion_length + extra)
        )
    return batcher


class WindowScorer:
    """Scores a file window by window, and counts its tokens, compiled shapes and seconds."""

    def __init__(
        self,
        session: ScoringSession,
        params: Params,
        role: ScoredRole,
        *,
        micro_batcher: FixedRowBatcher | PackedRowBatcher,
    ) -> None:
        self._session = session
        self._role: ScoredRole = role
        self._micro_batcher = micro_batcher
        # With offload, the reference weights are on the device only while a window is scored.
        is_offloaded = role == "reference" and session.settings.score.reference.offload
        if is_offloaded:
            check_host_memory(session.mesh, "score.reference.offload")
        self._params = to_host_memory(params) if is_offloaded else params
        self._shapes: set[tuple[int, ...]] = set()
        self._totals: defaultdict[str, float] = defaultdict(int)
        self._seconds = self._max_difference = 0.0

    def score_windows(
        self, windows: Iterable[Sequence[LocatedSample]], *, num_samples: int
    ) -> Iterator[Iterator[bytes]]:
        """Yields the lines of this host's part of each window, in order, with the role's logprobs or values.

        A line with NaN or an infinity raises ValueError when it is read, so that hosts can do this in an error barrier.
        """
        done = 0
        field = "values" if self._role == "critic" else f"{self._role}_logprobs"
        for window in windows:
            samples = [one.sample for one in window]
            done += len(samples)
            batcher = self._micro_batcher if done == num_samples else EqualShapeBatcher(self._micro_batcher)
            shard = host_slice(len(samples))
            start = time.perf_counter()
            scored, plan = self._session.score(
                to_device_memory(self._params), samples[shard.start : shard.stop], self._role, batcher=batcher
            )
            self._seconds += time.perf_counter() - start
            self._totals["tokens"] += sum(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples)
            local = window[shard.start : shard.stop]
            was_sampled = [one.record.get("behavior_logprobs") is not None for one in local]
            self._update_totals([*compress(scored, was_sampled)], plan)
            # Only this field and the ids of texts are added; other missing fields are not filled in.
            yield (
                to_json_line(
                    {
                        **one.record,
                        "prompt_token_ids": s.prompt.token_ids.tolist(),
                        TOKEN_IDS: s.completion_ids.tolist(),
                        field: getattr(s, field).tolist(),
                    },
                    f"{one.where}: {field}",
                )
                for s, one in zip(scored, local, strict=True)
            )
            if len(samples) < num_samples and jax.process_index() == 0:
                print(f"scored {done:,} of {num_samples:,} samples", file=sys.stderr)

    def _update_totals(self, samples: Sequence[Sample], micro_batches: GlobalPlan) -> None:
        """Adds the figures of a plan, and how much the logprobs of `samples` differ from the sampler's logprobs."""
        if self._role != "critic":
            none = np.zeros(0, np.float32)
            logprobs = attrgetter(f"{self._role}_logprobs")
            differences = np.abs(
                np.concatenate([none, *((logprobs(s) - s.behavior_logprobs)[s.mask] for s in samples)])
            )
            self._max_difference = max(self._max_difference, float(differences.max(initial=0.0)))
            self._totals["differences"] += differences.size
            self._totals["difference"] += float(differences.sum(dtype=np.float64))
        figures = micro_batches.packing_stats()
        for name in ("real_tokens", "computed_tokens", "num_micro_batches"):
            self._totals[name] += figures[name]
        plan = micro_batches.local_plan
        scanned = (plan.num_micro_batches,) if self._session.settings.score.is_scanned(self._role) else ()
        self._shapes |= {(len(one.rows), *astuple(one.shape), *scanned) for one in plan.micro_batches}

    def metrics(self, compilations: CompilationCounter) -> dict[str, Any]:
        """Returns the metrics of all windows; seconds exclude compilation. All hosts must call it together."""
        total = self._totals
        real, computed = total["real_tokens"], total["computed_tokens"]
        seconds = self._seconds - compilations.seconds
        metrics = {
            "tokens": total["tokens"],
            "real tokens": real,
            "padded tokens": computed - real,
            "fill": round(real / computed, 4),
            "micro-batches": total["num_micro_batches"],
            "shapes compiled": len(self._shapes),
            "compilations": compilations.take_count(),
            "compiling seconds": round(compilations.seconds, 2),
            "seconds": round(seconds, 3),
            "tokens/s": round(total["tokens"] / seconds, 1),
            "peak memory MiB": round(peak_memory_bytes() / 2**20, 1),
        }
        if self._role == "critic":
            return metrics
        difference, count = sum_over_hosts(np.asarray([total["difference"], total["differences"]], np.float64)).tolist()
        largest = float(max_over_hosts(self._max_difference))
        if count:
            metrics |= {"mean |logprob - behavior|": difference / count, "max |logprob - behavior|": largest}
        return metrics


def check_packing(session: ScoringSession, params: Params, samples: Sequence[Sample]) -> float:
    """Returns the largest |logprob in a shared row - logprob in a separate row|, in nats.

    The shared row is packed in two ways: with the prompt repeated for each sample, and with one copy for all samples of
    a prompt. Only the first tokens of long samples are compared.

    Raises:
        RuntimeError: a difference is larger than rounding can explain, so packed rows would give wrong scores.
    """
    samples = [_truncate_sample(sample) for sample in samples]
    apart = [(i,) for i in range(len(samples))]
    keys = sequence_lengths(samples).prompt_keys
    by_prompt = [tuple(np.flatnonzero(keys == key).tolist()) for key in dict.fromkeys(keys.tolist())]
    alone, *together = _score_arrangements(session, params, samples, [apart, by_prompt])
    # Scores that are non-finite even alone are not a leak.
    known = np.isfinite(alone)
    differences = np.concatenate([np.abs(shared - alone)[known] for shared in together])
    local = differences.max(initial=0.0), differences.mean() if known.any() else 0.0
    # The result must be the same on every host: if only one host raised, the others would wait for it.
    largest, mean = max_over_hosts(local).tolist()
    max_allowed, mean_allowed = TOLERANCES[session.settings.model.dtype]
    # Not `>`: NaN must fail the check.
    if not (largest <= max_allowed and mean <= mean_allowed):
        raise RuntimeError(
            f"scores in a shared row differ from those in a separate row by up to {largest:.2g} nats: attention "
            "leaks between samples on this backend. Please report it; until it is fixed, set score.dynamic: false "
            "and algorithm.dynamic_microbatch: false (also used by the critic)"
        )
    return largest


def _truncate_sample(sample: Sample) -> Sample:
    prompt, completion = (ids[: MAX_SAMPLE_TOKENS // 2] for ids in (sample.prompt.token_ids, sample.completion_ids))
    return replace(sample, prompt=replace(sample.prompt, token_ids=prompt), completion_ids=completion, loss_mask=None)


def _score_arrangements(
    session: ScoringSession,
    params: Params,
    samples: Sequence[Sample],
    arrangements: Sequence[Sequence[tuple[int, ...]]],
) -> list[np.ndarray]:
    """Returns the logprobs of all samples in separate rows, then those in one shared row for each arrangement.

    Rows are scored one at a time while the other devices are idle, so that memory for one row is enough.
    """
    count, num_tokens = len(samples), len(samples) * MAX_SAMPLE_TOKENS
    rows: list[PackedRow] = [((i,),) for i in range(count)]
    for number, segments in enumerate(arrangements, start=1):
        rows.append(tuple(tuple(i + number * count for i in segment) for segment in segments))
    empty = ((),) * (num_local_row_shards(session.mesh) - 1)
    plan = MicroBatchPlan(tuple(MicroBatch((row, *empty), RowShape(num_tokens, num_tokens)) for row in rows))
    copies = [sample for _ in range(1 + len(arrangements)) for sample in samples]
    scorer = session.scorer if session.teacher is None else session.reference_scorer
    scores = scorer.per_token(params, copies, plan, temperature=1.0)
    return [np.concatenate(scores[first : first + count]) for first in range(0, len(copies), count)]
