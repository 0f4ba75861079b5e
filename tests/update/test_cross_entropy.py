"""Tests the loss of given completions against transformers and a float64 oracle."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from app.batching.micro_batch_plan import TokenBudget
from app.batching.micro_batcher import FixedRowBatcher, MicroBatcher, PackedRowBatcher
from app.model.architecture import forward_flops
from app.model.io.hf_weights import load_weights
from app.records.sample import Sample
from app.runtime.model_spec import ModelSpec, read_model_spec
from app.update.loss_aggregation import aggregations
from app.update.optimizer import init_train_state, make_optimizer, train_state_shardings
from app.update.policy_loss import CrossEntropyLoss, make_policy_objective
from app.update.step import UpdateStep
from app.update.updater import PolicyBatchPacker, Updater
from settings import load
from settings.schema.algorithm import OptimizerSettings
from tests.model.reference import SIZES, import_reference, load_reference, reference_logits, write_checkpoint
from tests.tiny import EVEN, make_mesh, random_samples

LONGEST = 9
FIXED = FixedRowBatcher(2, trim_tail=False)
PACKED = PackedRowBatcher(
    TokenBudget(max_tokens_per_device=48, row_length=24, share_prompts=True, balance=True), forward_flops(EVEN)
)
SAMPLES = [
    replace(sample, behavior_logprobs=np.full(len(sample.completion_ids), np.nan, np.float32))
    for sample in random_samples(30, 1, vocab_size=SIZES["vocab_size"], with_holes=True)
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", attention_bias=True)


@functools.cache
def spec_of(path: Path) -> ModelSpec:
    return read_model_spec(load(None, [f"model.path={path}"], {}).settings, generates=False)


def learned(
    path: Path, samples: Sequence[Sample], mesh_shape: Any, batcher: MicroBatcher, aggregation: str = "token-mean"
) -> dict[str, float]:
    """Returns the metrics of an optimizer step."""
    spec, mesh, schedule = spec_of(path), make_mesh(mesh_shape), optax.constant_schedule(1e-3)
    definition, shardings = spec.definition, spec.definition.shardings(mesh)
    optimizer = make_optimizer(OptimizerSettings(), schedule)
    layout = train_state_shardings(optimizer, definition.shapes, shardings, mesh)
    objective = make_policy_objective(
        definition, CrossEntropyLoss(), dtype=jnp.dtype("float32"), remat="minimal", logits_chunk=5
    )
    pack = PolicyBatchPacker(aggregations(max_new_tokens=LONGEST)[aggregation], roles=())
    updater = Updater(UpdateStep(objective, optimizer, schedule, layout), mesh, micro_batcher=batcher, pack=pack)
    state = init_train_state(optimizer, load_weights(definition, spec.files.weights, mesh), layout)
    return updater.update(state, [[samples]], temperature=1.0)[1]


@pytest.fixture(scope="module")
def transformers_step(checkpoint: Path) -> tuple[float, float]:
    """Returns loss and gradient norm of the cross-entropy of transformers over padded samples."""
    torch, _ = import_reference()
    whole = [np.concatenate([s.prompt.token_ids, s.completion_ids]) for s in SAMPLES]
    ids, labels, seen = (np.full((len(SAMPLES), max(map(len, whole))), fill) for fill in (0, -100, 0))
    for row, (sample, tokens) in enumerate(zip(SAMPLES, whole, strict=True)):
        ids[row, : len(tokens)], seen[row, : len(tokens)] = tokens, 1
        labels[row, len(sample.prompt.token_ids) : len(tokens)] = np.where(sample.mask, sample.completion_ids, -100)
    model = load_reference(checkpoint)
    tensors = {"input_ids": ids, "labels": labels, "attention_mask": seen}
    loss = model(**{name: torch.from_numpy(x.astype(np.int64)) for name, x in tensors.items()}).loss
    loss.backward()
    norms = [parameter.grad.norm().item() for parameter in model.parameters()]
    return loss.item(), float(np.linalg.norm(norms))


@pytest.mark.parametrize(
    ("mesh_shape", "batcher"),
    [((1, 1, 1), PACKED), ((1, 1, 1), FIXED), ((2, 2, 2), PACKED), ((1, 4, 1), FIXED)],
    ids=["packed", "fixed", "packed-2,2,2", "fixed-1,4,1"],
)
def test_cross_entropy_loss_and_gradient_equal_transformers(mesh_shape, batcher, checkpoint, transformers_step) -> None:
    metrics = learned(checkpoint, SAMPLES, mesh_shape, batcher)
    assert (metrics["loss"], metrics["policy/grad_norm"]) == pytest.approx(transformers_step, rel=1e-5)
    assert metrics["batching/num_micro_batches"] > 1
    measured = {name for name in metrics if not name.startswith(("batching/", "global_seqlen/"))}
    of_optimizer = {f"policy/{name}" for name in ("grad_norm", "learning_rate", "nonfinite_updates")}
    assert measured == {"loss", "policy/entropy", "policy/nonfinite_in_a_row", *of_optimizer}


def sums_over(weigh: Callable[[np.ndarray], float], losses: Sequence[np.ndarray]) -> float:
    return float(sum(weigh(one) for one in losses if len(one)))


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant-length"]
)
def test_aggregated_loss_and_entropy_equal_a_float64_oracle(aggregation: str, checkpoint: Path) -> None:
    model, losses, entropies = load_reference(checkpoint), list[np.ndarray](), list[np.ndarray]()
    # One sample has no token in the loss and is therefore not counted as a sample.
    samples = [replace(SAMPLES[0], loss_mask=np.zeros(len(SAMPLES[0].completion_ids), bool)), *SAMPLES[1:]]
    for sample in samples:
        whole = np.concatenate([sample.prompt.token_ids, sample.completion_ids])
        logits = reference_logits(model, whole)[len(sample.prompt.token_ids) - 1 : -1].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen = logprobs[np.arange(len(logprobs)), sample.completion_ids]
        losses.append(-chosen[sample.mask])
        entropies.append(-(np.exp(logprobs) * logprobs).sum(-1)[sample.mask])
    num_samples, num_tokens = sum(len(one) > 0 for one in losses), sum(map(len, losses))
    expected = {
        "token-mean": sums_over(np.sum, losses) / num_tokens,
        "sequence-mean-token-mean": sums_over(np.mean, losses) / num_samples,
        "sequence-mean-token-sum": sums_over(np.sum, losses) / num_samples,
        "constant-length": sums_over(np.sum, losses) / num_samples / LONGEST,
    }
    metrics = learned(checkpoint, samples, (1, 1, 1), PACKED, aggregation)
    assert metrics["loss"] == pytest.approx(expected[aggregation], rel=1e-5)
    assert metrics["policy/entropy"] == pytest.approx(sums_over(np.sum, entropies) / num_tokens, rel=1e-5)
