import functools
from contextlib import closing
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan, RowShape, TokenBudget
from app.batching.micro_batcher import FixedRowBatcher, MicroBatcher, PackedRowBatcher
from app.batching.token_batch import pack_tokens
from app.mesh.program_cache import CompilationCounter
from app.model.architecture import Architecture, forward_flops
from app.model.decoder import DecoderDefinition, Params
from app.model.segment_layout import single_segment_layout
from app.records.sample import Sample
from app.score.scorer import Scorer
from tests.tiny import BIASED, ODD, make_mesh, random_params, random_samples

FLOAT32 = jnp.dtype("float32")
ONE_PASS = FixedRowBatcher(None, trim_tail=False)
SAMPLES = random_samples(3, 3, vocab_size=ODD.vocab_size, with_holes=True, seed=3)


@functools.cache
def params_of(architecture: Architecture) -> Params:
    return random_params(DecoderDefinition.create(architecture))


@functools.cache
def scorer_of(architecture: Architecture, logits_chunk: int = 128) -> Scorer:
    return Scorer(DecoderDefinition.create(architecture), make_mesh(), dtype=FLOAT32, logits_chunk=logits_chunk)


def score(
    samples, *, architecture=ODD, temperature=1.0, cut: MicroBatcher = ONE_PASS, run=Scorer.run_looped, logits_chunk=128
) -> list[np.ndarray]:
    scorer = scorer_of(architecture, logits_chunk)
    return scorer.per_token(
        params_of(architecture),
        samples,
        cut(samples, scorer.mesh).local_plan,
        temperature=temperature,
        runner=functools.partial(run, scorer),
    )


@functools.cache
def hidden_function(architecture: Architecture):
    definition = DecoderDefinition.create(architecture)
    return jax.jit(lambda params, *rows: definition.bind(params).hidden(*rows, dtype=FLOAT32))


def slow_logprobs(sample: Sample, architecture: Architecture, temperature: float) -> np.ndarray:
    """Computes logprobs in float64 from all logits of each sequence in its own row."""
    params, num_prompt = params_of(architecture), len(sample.prompt.token_ids)
    row = np.zeros((1, 16), np.int32)
    ids = np.concatenate([sample.prompt.token_ids, sample.completion_ids])
    row[0, : len(ids)] = ids
    hidden = hidden_function(architecture)(params, row, single_segment_layout(jnp.ones((1, 16), bool)))[0]
    head = params["embedding"] if architecture.tied_embeddings else params["output"]
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / temperature
    log_softmax = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return np.array([log_softmax[num_prompt - 1 + t, token] for t, token in enumerate(sample.completion_ids)])


def assert_close(ours, expected, atol=1e-5) -> None:
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


@pytest.mark.parametrize(("architecture", "temperature"), [(ODD, 0.6), (BIASED, 1.5)], ids=["tied", "untied-biases"])
def test_logprobs_of_every_completion_token_equal_a_float64_oracle(architecture, temperature):
    expected = [slow_logprobs(s, architecture, temperature) for s in SAMPLES]
    assert_close(score(SAMPLES, architecture=architecture, temperature=temperature), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("num_samples", "rows_per_device", "run", "trim_tail"),
    [(9, 2, Scorer.run_looped, True), (1, 100, Scorer.run_scanned, False)],
)
def test_fixed_micro_batches_give_the_logprobs_of_a_single_pass(num_samples, rows_per_device, run, trim_tail):
    """Micro-batches of 2 leave an uneven last one of 9 samples."""
    cut = FixedRowBatcher(rows_per_device, trim_tail=trim_tail)
    for ours, expected in zip(score(SAMPLES[:num_samples], cut=cut, run=run), score(SAMPLES), strict=False):
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_scoring_by_loop_and_scan_gives_equal_bits_for_equal_shapes():
    cut = FixedRowBatcher(3, trim_tail=True)
    assert_close(score(SAMPLES, cut=cut, run=Scorer.run_scanned), score(SAMPLES, cut=cut), atol=0)


def test_scoring_random_lengths_compiles_each_row_shape_once():
    scorer = Scorer(DecoderDefinition.create(ODD), make_mesh(), dtype=FLOAT32, logits_chunk=128)
    cut = PackedRowBatcher(TokenBudget(64, 32, share_prompts=True, balance=True), forward_flops(ODD))
    shapes = set()
    with closing(CompilationCounter()) as compilations:
        for seed in range(6):
            samples = random_samples(seed % 3 + 1, 3, vocab_size=ODD.vocab_size, seed=seed)
            plan = cut(samples, scorer.mesh).local_plan
            shapes |= {(len(one.rows), one.shape) for one in plan.micro_batches}
            scorer.per_token(params_of(ODD), samples, plan, temperature=1.0)
        assert compilations.take_count() == len(shapes) <= 16
        for _ in range(2):
            plan = FixedRowBatcher(4, trim_tail=False)(SAMPLES, scorer.mesh).local_plan
            scorer.per_token(params_of(ODD), SAMPLES, plan, temperature=1.0, runner=scorer.run_scanned)
        assert compilations.take_count() == 1


def test_memory_of_scoring_does_not_grow_with_the_number_of_micro_batches():
    scorer, params = scorer_of(ODD), params_of(ODD)

    def most_alive(num_samples: int) -> int:
        counts = []

        def counted():
            for micro_batch in FixedRowBatcher(1, trim_tail=False)(samples, scorer.mesh).local_plan.micro_batches:
                # Counts the rows sent to the device; on a CPU, results are arrays of the host.
                counts.append(sum(array.dtype == jnp.int32 for array in jax.live_arrays()))
                yield pack_tokens(samples, micro_batch)

        samples = [SAMPLES[i % len(SAMPLES)] for i in range(num_samples)]
        with jax.set_mesh(scorer.mesh):
            assert len(scorer.run_looped(params, counted(), np.float32(1))) == num_samples
        return max(counts)

    assert most_alive(64) <= most_alive(8)


def test_scored_logprobs_do_not_depend_on_sample_order_mask_or_chunk_size():
    order, expected = np.random.default_rng(0).permutation(len(SAMPLES)), score(SAMPLES)
    assert_close(score([SAMPLES[i] for i in order]), [expected[i] for i in order])
    assert_close(score([replace(s, loss_mask=None) for s in SAMPLES]), expected, atol=0)
    assert_close(score(SAMPLES, temperature=0.0), expected, atol=0)  # greedy samples are scored at temperature 1
    for logits_chunk in (1, 5):
        assert_close(score(SAMPLES, logits_chunk=logits_chunk), expected)


@settings(max_examples=25)
@given(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=9, max_size=9), st.permutations(range(9)), st.booleans())
def test_packed_samples_get_the_logprobs_of_unpacked_samples(row_of, order, shared):
    """Rows have up to three samples; a fourth goes into another row."""
    rows: list[list[int]] = [[] for _ in range(12)]
    for i in order:
        row = rows[row_of[i]]
        (row if len(row) < 3 else rows[3 + i]).append(i)
    plan = MicroBatchPlan((MicroBatch(tuple(segments(row, shared) for row in rows), RowShape(48, 32)),))
    assert_close(scorer_of(ODD, 32).per_token(params_of(ODD), SAMPLES, plan, temperature=1.0), score(SAMPLES))


def segments(row: list[int], shared: bool) -> tuple[tuple[int, ...], ...]:
    """Returns segments with one prompt per sample, or one per group."""
    if not shared:
        return tuple((i,) for i in row)
    groups = dict.fromkeys(SAMPLES[i].group_id for i in row)
    return tuple(tuple(i for i in row if SAMPLES[i].group_id == group) for group in groups)
