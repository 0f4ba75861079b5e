"""Tests that the check of attention finds errors of every kind, and says how to avoid a kernel that has one."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from app.model.attention import packed
from app.model.attention.dense import ScoreMod
from app.model.attention.pairs import Blocking
from app.model.kernels import tpu_attention, tpu_decode
from app.preflight import attention_check
from app.preflight.attention_check import WINDOW, attention_differences, check_attention
from app.preflight.check_results import CheckRecorder, CheckResult
from app.preflight.inspect_mesh import read_config_only_spec
from app.runtime.scoring import ScoringSession
from app.training.learner import make_learner_group
from settings import load
from tests.program import of_tiny
from tests.tiny import SWITCHED, make_mesh

pytestmark = pytest.mark.usefixtures("interpreted")

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
packed_attention = packed.packed_attention
in_blocks = functools.partial(attention_differences, blocking=packed.BLOCKING_BY_PLATFORM["cpu"])


def test_blockwise_attention_differs_from_dense_attention_only_by_rounding():
    assert in_blocks(SWITCHED, make_mesh((2, 2, 2)), FLOAT32, window=WINDOW).max() < 1e-5
    rounded = in_blocks(SWITCHED, make_mesh(), BFLOAT16, window=WINDOW).max()
    assert 1e-4 < rounded < attention_check.TOLERANCES["bfloat16"]


FAULTS: dict[str, Callable[..., Any]] = {
    "branches": lambda q, k, v, layout, **rest: packed_attention(
        *(q, k, v, layout._replace(branch_ids=jnp.zeros_like(layout.branch_ids))), **rest
    ),
    "segments": lambda q, k, v, layout, **rest: packed_attention(
        *(q, k, v, layout._replace(segment_ids=jnp.minimum(layout.segment_ids, 1))), **rest
    ),
    "window": lambda *arrays, **rest: packed_attention(*arrays, **rest | {"window": None}),
    "soft cap": lambda *arrays, **rest: packed_attention(
        *arrays, **rest | {"score_mod": ScoreMod(rest["score_mod"].scale)}
    ),
    "gradient of keys": lambda q, k, *rest, **how: packed_attention(q, jax.lax.stop_gradient(k), *rest, **how),
    "a nan": lambda *arrays, **rest: packed_attention(*arrays, **rest).at[0, 0, 0, 0].set(jnp.nan),
}
"""Attention functions that ignore what their key says, or return a NaN."""


@pytest.mark.parametrize("fault", FAULTS)
def test_attention_check_finds_every_injected_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_check, "packed_attention", FAULTS[fault])
    differences = in_blocks(SWITCHED, make_mesh(), BFLOAT16, window=WINDOW)
    assert not differences.max() <= 2 * attention_check.TOLERANCES["bfloat16"], differences
    if fault == "gradient of keys":
        assert differences.argmax() == 2 and differences[2] == 1


@pytest.fixture(scope="module")
def session(tiny_model: Path) -> ScoringSession:
    overrides = (*of_tiny(tiny_model)[1::2], "mesh.shape=2,2,2")
    settings = load(None, overrides, {}).settings
    return ScoringSession.open(settings, read_config_only_spec(settings).model)


def check(session: ScoringSession) -> CheckResult:
    recorder = CheckRecorder()
    check_attention(recorder, session, make_learner_group(session), None)
    (result,) = recorder.results
    return result


def use_kernel(monkeypatch: pytest.MonkeyPatch, **kernels: Callable[..., Any]) -> None:
    """Makes this platform use the TPU's kernels, or the given ones."""
    blocking = Blocking(128, 1, kernel="tpu")
    monkeypatch.setattr(attention_check, "architecture_blocking", lambda *_: blocking)
    for size in ("decode_block_size", "cache_block_size"):
        monkeypatch.setattr(attention_check, size, lambda *_, **__: 128)
    if "decode" in kernels:
        monkeypatch.setattr(tpu_decode, "attend", kernels.pop("decode"))
    for name, kernel in kernels.items():
        monkeypatch.setattr(tpu_attention, name, kernel)


def test_attention_check_compares_the_kernel_of_the_run_and_advises_xla_if_it_differs(session, monkeypatch):
    use_kernel(monkeypatch)
    result = check(session)
    assert result.verdict == "ok", result
    assert result.found.startswith("the kernel for cpu equals dense attention of single rows within ")
    assert result.found.endswith("of the largest number (0.0001 is allowed in float32): output, gradients, decoding")
    right: Any = tpu_decode.attend

    def forgetful(*arguments: Any) -> Any:
        mixed, cache = right(*arguments)
        return mixed, cache._replace(keys=arguments[5].keys)

    use_kernel(monkeypatch, decode=forgetful)
    result = check(session)
    assert (result.verdict, result.exit_code, result.advice) == ("fail", 1, "set model.attention: xla")
    assert "the cache of keys differs from that of dense attention by" in result.found
