"""Times the phases of grpo's training step for `train_step.py`.

python scripts/bench/step_of_grpo.py --model DIR --rows FILE.jsonl --beta 0 --steps 3 --warmup 1
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace

import jax
import workload

import settings
from app.checkpoint.train_progress import RunState
from app.rollout.engine.continuous_batching import ContinuousBatchGenerator
from app.rollout.engine.engine import SlotEngine
from app.runtime.session import Session
from app.tracking.console import ProgressDisplay
from app.tracking.timer import StepTimer
from app.training.rollout_source import make_rollout_source
from app.training.setup import RunSetup, prepare_run
from app.training.step_stages import RewardStage, ScoreStage
from app.training.trainer import Trainer


def main() -> None:
    parser = workload.parser_of(__doc__)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps, facts = measured(options, folder)
    workload.report(steps, **facts, beta=options.beta, versions={"jax": jax.__version__})


def measured(options: argparse.Namespace, folder: str) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Runs the steps; returns the seconds of each phase after the warm-up, and peak memory and sizes of the work."""
    steps, samples = [], []
    with prepare_run(resolved(options, folder), resume="never") as launch:
        trainer, state = opened(launch)
        for step in range(1, trainer.settings.run.steps + 1):
            timer = StepTimer(ProgressDisplay(num_steps=trainer.settings.run.steps, first_step=0, enabled=False))
            position = workload.NUM_PROMPTS * (step - 1)
            state, samples, _ = trainer.step(state, step=step, position=position, timer=timer)
            timer.stop()
            seconds = {name: timer.seconds[f"time/{name}_s"] for name in (*workload.PHASES, "step")}
            assert all(len(sample.completion_ids) == workload.NEW_TOKENS for sample in samples)
            print(f"step {step}", {name: round(value, 2) for name, value in seconds.items()}, flush=True)
            if step > options.warmup:
                steps.append(seconds)
        statistics = jax.devices()[0].memory_stats() or {}
        peak_memory_bytes = statistics.get("peak_bytes_in_use") or workload.peak_memory_bytes()
    return steps, {
        "peak_memory_bytes": peak_memory_bytes,
        "num_parameters": trainer.session.model_spec.definition.num_parameters,
        "prompt_tokens_per_step": sum(len(s.prompt.token_ids) for s in samples) / workload.GROUP_SIZE,
        "tokens_per_step": sum(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples),
    }


def opened(launch: RunSetup) -> tuple[Trainer, RunState]:
    """Returns a trainer whose completions all have the maximum length, and the initial state."""
    chosen, session = launch.resolved.settings, launch.session
    session = replace(session, continuous_batching=endless(session))
    learning = launch.learning
    state = RunState(learning.policy.initial_state(session.scoring.initial_trained_params()))
    reference = session.scoring.load_params() if "reference" in chosen.scored_roles else None
    source = make_rollout_source(session, launch.inputs.prompts, max_rounds=learning.max_rounds)
    reward = RewardStage(launch.rewards.compute_rewards, chosen.run.steps)
    score = ScoreStage(session.scoring, learning.score_batchers, reference)
    return Trainer(session, source, reward, score, learning, launch.rewards), state


def resolved(options: argparse.Namespace, folder: str) -> settings.Resolved:
    lines = {
        "run.steps": options.warmup + options.steps,
        "run.dir": folder,
        "model.path": options.model,
        "data.source": options.rows,
        "data.shuffle": "false",
        "data.max_prompt_length": workload.MAX_PROMPT_LENGTH,
        "eval.every_steps": 0,
        "rollout.prompts_per_step": workload.NUM_PROMPTS,
        "rollout.group_size": workload.GROUP_SIZE,
        "rollout.max_new_tokens": workload.NEW_TOKENS,
        "reward.functions": f"['{workload.__file__}:reward_of']",
        "algorithm.beta": options.beta,
        "algorithm.max_tokens_per_device": 768,
        "optimizer.learning_rate": workload.LEARNING_RATE,
    }
    overridden = dict(override.partition("=")[::2] for override in options.overrides)
    return settings.load("quickstart", [f"{k}={v}" for k, v in (lines | overridden).items()], os.environ)


def endless(session: Session) -> ContinuousBatchGenerator:
    """Returns a generator like the session's but without EOS tokens, so that completions have the maximum length."""
    programs, chosen = session.evaluation_generator.engine.programs, session.settings
    engine = SlotEngine(
        programs.definition, programs.mesh, programs.shapes, eos_ids=(), dtype=programs.dtype, exact=False
    )
    tokenizer = session.model_spec.tokenizer
    texts = {"decode_text": tokenizer.decode, "stop_text": tokenizer.stop_text}
    return ContinuousBatchGenerator(engine, **texts, segment_rule=chosen.rollout.segment)


if __name__ == "__main__":
    main()
