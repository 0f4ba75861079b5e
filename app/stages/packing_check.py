"""Checks, with the real weights, that samples in a packed row do not influence each other: `score --check-packing`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan, PackedRow, RowShape
from app.batching.micro_batcher import sequence_lengths
from app.distributed.collectives import max_over_hosts
from app.mesh.placement import num_local_row_shards
from app.model.decoder import Params
from app.records.sample import Sample
from app.runtime.scoring import ScoringSession

TOLERANCES = {"float32": (1e-4, 1e-4), "bfloat16": (0.5, 0.05)}
"""Largest and mean difference, in nats, that the order of summation explains, by compute type; seeing tokens of another
sample causes far larger ones."""

MAX_SAMPLE_TOKENS = 128
"""Number of compared tokens of each sample. A row of three such samples uses block-wise attention on every backend."""


def check_packing(session: ScoringSession, params: Params, samples: Sequence[Sample]) -> float:
    """Returns the largest |logprob in a shared row - logprob alone|, in nats, over all tokens of a few samples.

    In the first arrangement each sample of the row has its own segment; in the second, if prompts are shared, samples
    of the same prompt share its segment. Only the first tokens of long samples are compared.

    Raises:
        RuntimeError: a difference is larger than rounding explains, so packed rows would give wrong scores.
    """
    samples = [_truncate_sample(sample) for sample in samples]
    apart = [(i,) for i in range(len(samples))]
    prompts = sequence_lengths(samples).prompt_indices
    by_prompt = [tuple(np.flatnonzero(prompts == number).tolist()) for number in range(prompts.max() + 1)]
    alone, *together = _score_arrangements(session, params, samples, [apart, by_prompt])
    # Scores that are not finite even alone are no leak.
    known = np.isfinite(alone)
    differences = np.concatenate([np.abs(shared - alone)[known] for shared in together])
    local = differences.max(initial=0.0), differences.mean() if known.any() else 0.0
    # The result must be the same on every host: if only one raised, the others would wait for it.
    largest, mean = max_over_hosts(np.asarray(local)).tolist()
    max_allowed, mean_allowed = TOLERANCES[session.settings.model.dtype]
    # Not `>`: NaN must fail the check.
    if not (largest <= max_allowed and mean <= mean_allowed):
        raise RuntimeError(
            f"scores in a shared row differ from those of a sample alone by up to {largest:.2g} nats: attention "
            "leaks between samples on this backend. Please report it; until it is fixed, set score.dynamic: false "
            "and algorithm.dynamic_microbatch: false, which the critic follows"
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
    """Scores all samples first in a row of their own, then together in one row per arrangement.

    One program scores one row at a time while the other devices are idle, so it needs memory for one row only.
    """
    count, num_tokens = len(samples), len(samples) * MAX_SAMPLE_TOKENS
    rows: list[PackedRow] = [((i,),) for i in range(count)]
    for number, segments in enumerate(arrangements, start=1):
        rows.append(tuple(tuple(i + number * count for i in segment) for segment in segments))
    empty = ((),) * (num_local_row_shards(session.mesh) - 1)
    plan = MicroBatchPlan(tuple(MicroBatch((row, *empty), RowShape(num_tokens, num_tokens)) for row in rows))
    copies = [sample for _ in range(1 + len(arrangements)) for sample in samples]
    scores = session.scorer.per_token(params, copies, plan, temperature=1.0)
    return [np.concatenate(scores[first : first + count]) for first in range(0, len(copies), count)]
