"""Does a sample score alike whoever shares its row? Asked of the real weights, on the devices that will train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from app.batching.plan import MicroBatch, Plan, RowShape
from app.flow import Prompt, Sample
from app.mesh.placement import max_over_hosts, num_local_row_shards
from app.policy.decoder import Params
from app.training.session import Session

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5}
"""Nats, by compute type: rounding stays below it, and another sample's tokens in view far above."""

LONGEST = 128
"""Tokens of a made-up sample: three make a row that attention takes block by block."""


def check_packing(session: Session, params: Params, samples: Sequence[Sample]) -> float:
    """Largest |logprob in a shared row - logprob alone|, in nats, over all tokens of a few samples.

    Raises:
        RuntimeError: it is beyond rounding, so that packed rows would not give the samples' own logprobs.
    """
    together, alone = map(np.concatenate, _scored(session, params, samples))
    # Weights that give no number alone have a trouble of their own, which the first update tells.
    own = np.abs(together - alone)[np.isfinite(alone)].max(initial=0.0)
    # On every host the same, or one would stop alone and the others wait for it.
    difference = float(max_over_hosts(np.asarray(own)))
    # Not `>`: a NaN is no agreement.
    if not difference <= TOLERANCE[session.settings.model.dtype]:
        raise RuntimeError(
            f"samples that share a row score differently from alone by up to {difference:.2g} nats: attention leaks "
            "between them on this backend, please report it. Until then set score.dynamic: false and "
            "algorithm.dynamic_microbatch: false"
        )
    return difference


def _scored(session: Session, params: Params, samples: Sequence[Sample]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Logprobs of the samples in one row, then of the samples each in a row of its own, from one program."""
    num_samples = len(samples)
    segments: dict[bytes, list[int]] = {}
    for i, sample in enumerate(samples):
        segments.setdefault(sample.prompt.token_ids.tobytes(), []).append(i)
    rows = [tuple(map(tuple, segments.values())), *(((num_samples + i,),) for i in range(num_samples))]
    num_tokens = sum(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples)
    # A row at a time, the other devices idle: no more memory than one such row takes.
    empty = ((),) * (num_local_row_shards(session.mesh) - 1)
    plan = Plan(tuple(MicroBatch((row, *empty), RowShape(num_tokens, num_tokens)) for row in rows))
    logprobs = session.scorer.logprobs(params, [*samples, *samples], plan, temperature=1.0)
    return logprobs[:num_samples], logprobs[num_samples:]


def random_samples(session: Session) -> list[Sample]:
    """Three samples of random tokens, two of them behind one prompt."""
    rng = np.random.default_rng(session.settings.run.seed)
    longest = min(LONGEST, session.input.architecture.max_positions)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(session.input.architecture.vocab_size, size=count).astype(np.int32)

    def sample(prompt: Prompt, index: int) -> Sample:
        completion = tokens(longest - len(prompt.token_ids) - index)
        return Sample(
            prompt=prompt,
            sample_index=index,
            group_id=0,
            completion_ids=completion,
            completion="",
            behavior_logprobs=np.zeros(len(completion), np.float32),
            finish_reason="length",
            policy_version=0,
        )

    first = Prompt("random", tokens(longest // 2), "", None)
    second = replace(first, token_ids=tokens(longest // 3))
    return [sample(first, 0), sample(second, 1), sample(first, 2)]
