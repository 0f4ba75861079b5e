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
from app.model.segment_layout import SegmentLayout
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


def test_attention_in_blocks_is_within_rounding():
    assert in_blocks(SWITCHED, make_mesh((2, 2, 2)), FLOAT32, window=WINDOW).max() < 1e-5
    rounded = in_blocks(SWITCHED, make_mesh(), BFLOAT16, window=WINDOW).max()
    assert 1e-4 < rounded < attention_check.TOLERANCES["bfloat16"]


def without_branches(query: Any, keys: Any, values: Any, layout: SegmentLayout, **rest: Any) -> Any:
    return packed_attention(query, keys, values, layout._replace(branch_ids=jnp.zeros_like(layout.branch_ids)), **rest)


def without_segments(query: Any, keys: Any, values: Any, layout: SegmentLayout, **rest: Any) -> Any:
    return packed_attention(
        query, keys, values, layout._replace(segment_ids=jnp.minimum(layout.segment_ids, 1)), **rest
    )


def without_window(*arrays: Any, **rest: Any) -> Any:
    return packed_attention(*arrays, **rest | {"window": None})


def without_soft_cap(*arrays: Any, **rest: Any) -> Any:
    return packed_attention(*arrays, **rest | {"score_mod": ScoreMod(rest["score_mod"].scale)})


def without_gradient_of_keys(query: Any, keys: Any, *arrays: Any, **rest: Any) -> Any:
    return packed_attention(query, jax.lax.stop_gradient(keys), *arrays, **rest)


def with_a_nan(*arrays: Any, **rest: Any) -> Any:
    return packed_attention(*arrays, **rest).at[0, 0, 0, 0].set(jnp.nan)


@pytest.mark.parametrize(
    "faulty",
    [without_branches, without_segments, without_window, without_soft_cap, without_gradient_of_keys, with_a_nan],
    ids=lambda fault: fault.__name__,
)
def test_attention_check_finds_every_injected_fault(faulty, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_check, "packed_attention", faulty)
    differences = in_blocks(SWITCHED, make_mesh(), BFLOAT16, window=WINDOW)
    assert not differences.max() <= 2 * attention_check.TOLERANCES["bfloat16"], differences
    if faulty is without_gradient_of_keys:
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
    """Makes this platform's devices use the kernels, or others if they are given."""
    blocking = Blocking(128, 1, kernel="tpu")
    monkeypatch.setattr(attention_check, "architecture_blocking", lambda *_: blocking)
    for size in ("decode_block_size", "cache_block_size"):
        monkeypatch.setattr(attention_check, size, lambda *_, **__: 128)
    if "decode" in kernels:
        monkeypatch.setattr(tpu_decode, "attend", kernels.pop("decode"))
    for name, kernel in kernels.items():
        monkeypatch.setattr(tpu_attention, name, kernel)


def test_the_kernel_that_a_run_would_use_is_compared_and_fails_with_the_way_out(session, monkeypatch):
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
