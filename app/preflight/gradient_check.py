"""Checks the policy's gradients on a run's devices, in micro-batches of several shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from app.batching.sample_exchange import fetch_rows
from app.model.decoder import Params
from app.preflight.check_results import CheckRecorder
from app.records.sample import Prompt, Sample
from app.runtime.session import Session
from app.training.learner import LearnerGroup
from app.update.updater import parameter_names


def check_gradients(recorder: CheckRecorder, session: Session, learning: LearnerGroup, params: Params) -> None:
    """Checks that gradients are finite in micro-batches of 1, 2, 4, ... random samples, up to a full one.

    On TPUs, gradients of tied embeddings are known to be NaN in some shapes (jax-ml/jax#35409). All hosts must call it
    together.

    Args:
        params: the weights of `model.path`, as `ScoringSession.load_params` returns them.
    """
    if session.settings.rollout.routing_replay:
        recorder.skip("gradients", reason="samples for rollout.routing_replay need the routes of a rollout")
        return
    scoring, updater = session.scoring, learning.policy.updater
    adapts = session.model_spec.policy_definition.lora is not None
    trained, frozen = (scoring.initial_trained_params(), params) if adapts else (params, {})
    names = parameter_names(trained)
    broken, shapes = dict[str, str](), list[str]()
    are_finite = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree))
    with recorder.run_check("gradients"):
        while True:
            samples = [_random_sample(session, number) for number in range(2 ** len(shapes))]
            plan = updater.micro_batcher(samples, updater.mesh)
            if shapes and plan.plan.num_micro_batches > 1:
                break
            rows = fetch_rows(samples, plan, updater.pack.fields, updater.pack.route_shape)
            batches = updater.place(samples, rows)
            shapes.append(f"{batches[0].tokens.token_ids.shape}")
            with jax.set_mesh(updater.mesh):
                total = learning.policy.update_step.accumulate(trained, batches, jnp.float32(1), frozen)
                finite = jax.tree.leaves(jax.device_get(are_finite(total.gradients)))
            broken |= {name: shapes[-1] for name, one in zip(names, finite, strict=True) if not one}
        if broken:
            found = "; ".join(f"NaN or infinity for {name} in rows of {shape}" for name, shape in broken.items())
            advice = "the update skips such steps; set another algorithm.max_tokens_per_device, or model.dtype: float32"
            recorder.fail("gradients", found, advice)
        else:
            recorder.ok("gradients", f"finite in micro-batches of {', '.join(shapes)}")


def _random_sample(session: Session, seed: int) -> Sample:
    """Returns a sample of maximum length with random tokens and an advantage of 1 or -1."""
    settings, vocab_size = session.settings, session.model_spec.architecture.vocab_size
    rng, length = np.random.default_rng([settings.run.seed, seed]), settings.rollout.max_new_tokens
    prompt_ids, completion_ids = (
        rng.integers(vocab_size, size=size, dtype=np.int32) for size in (settings.data.max_prompt_length, length)
    )
    logprobs = np.full(length, -np.log(vocab_size), np.float32)
    return Sample(
        prompt=Prompt(f"random/{seed}", prompt_ids, "", None),
        sample_index=0,
        group_id=seed,
        completion_ids=completion_ids,
        completion="",
        behavior_logprobs=logprobs,
        finish_reason="length",
        policy_version=0,
        policy_logprobs=logprobs,
        reference_logprobs=logprobs,
        advantages=np.full(length, 1 - 2 * (seed % 2), np.float32),
    )
