"""Tests of the notes about adapters at launch."""

from __future__ import annotations

from pathlib import Path

from app.runtime.model_spec import adapter_notes, read_model_spec
from settings import Settings


def test_a_launch_says_which_weights_learn_and_that_a_critic_has_no_adapters(tiny_model: Path) -> None:
    model = read_model_spec(Settings.model_validate({"model": {"path": str(tiny_model), "lora": {"rank": 2}}}))
    (alone,) = adapter_notes(model, has_critic=False)
    assert alone.startswith("model.lora: 1,856 weights are trained (rank 2, alpha 16, q_proj")
    assert alone.endswith(" weights of tiny are frozen")
    assert adapter_notes(model, has_critic=True) == (f"{alone}; the critic trains all its weights",)
    assert adapter_notes(model.without_adapters, has_critic=True) == ()
