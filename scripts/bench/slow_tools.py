"""Times rollouts whose environment answers late, against the same engine where samples wait in their slots.

    python scripts/bench/slow_tools.py --samples 128 --slots 8

Every sample has three turns; the environment answers each after 0, 1 and 5 times the time of a turn, which is that of
the rollout without latency. Exact mode gives the same samples each time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from grpo import StepResult

LATENCY = "BENCH_LATENCY_S"
NUM_TURNS = 3


class Waiting:
    """Answers two turns after a while, and ends with the third."""

    def reset(self, *, seed: int, **columns: Any) -> None:
        self.num_turns = 0

    def step(self, text: str, calls: object) -> StepResult:
        time.sleep(float(os.environ[LATENCY]))
        self.num_turns += 1
        return StepResult("47+38=?", terminated=self.num_turns == NUM_TURNS)


def timed_rollout(options: Any, latency_s: float, overrides: Mapping[str, Any]) -> tuple[float, list[bytes], float]:
    """Returns seconds, the tokens of each sample, and the share of decode lanes that drew or took a token."""
    from contextlib import closing

    from app.mesh import jax_startup
    from app.runtime.inputs import encode_rows, read_train_rows
    from app.runtime.model_spec import read_model_spec
    from app.runtime.session import Session
    from settings import load

    os.environ[LATENCY] = f"{latency_s:.6f}"
    chosen = {
        "model.path": options.model,
        "model.dtype": "float32",
        "data.max_prompt_length": 32,
        "data.num_problems": options.samples,
        "rollout.group_size": 1,
        "rollout.prompts_per_step": options.samples,
        "rollout.max_new_tokens": 64,
        "rollout.mode": "exact",
        "rollout.slots": options.slots,
        "rollout.segment.min": 4,
        "mesh.shape": "1,1,1",
        "env.source": f"{os.path.abspath(__file__)}:Waiting",
        "plugins.env_vars": f"[{LATENCY}]",
        "env.concurrency": options.samples,
        **overrides,
    }
    settings = load(
        None, [f"{name}={value!r}" if name == "mesh.shape" else f"{name}={value}" for name, value in chosen.items()], {}
    ).settings
    jax_startup.initialize_distributed(settings.mesh)
    model = read_model_spec(settings)
    with closing(Session.open(settings, model)) as session:
        session.open_generators()
        prompts, _ = encode_rows(settings, read_train_rows(settings).rows, model.tokenizer)
        weights = session.engine.to_decode_weights(session.load_params())
        session.compile_rollout()
        session.sample(weights, prompts[: options.slots], policy_version=0)
        session.take_counters()
        start = time.perf_counter()
        samples = session.sample(weights, prompts, policy_version=0)
        seconds = time.perf_counter() - start
        steps = session.take_counters().row_steps
    num_tokens = sum(len(sample.completion_ids) for sample in samples)
    return seconds, [sample.completion_ids.tobytes() for sample in samples], num_tokens / steps


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--slots", type=int, default=8)
    options = parser.parse_args()
    seconds, expected, share = timed_rollout(options, 0.0, {})
    turn_s = seconds * options.slots / (options.samples * NUM_TURNS)
    print(f"without latency {seconds:.2f} s, lanes in use {share:.0%}; a turn takes {turn_s * 1000:.0f} ms in its slot")
    for times in (0, 1, 5):
        found = {}
        for name, limit in (("suspended", "null"), ("waiting in slots", 0)):
            found[name], ids, share = timed_rollout(options, times * turn_s, {"env.max_suspended": limit})
            print(f"latency {times} turns, {name}: {found[name]:.2f} s, lanes in use {share:.0%}", flush=True)
            assert ids == expected, "the samples differ"
        print(f"latency {times} turns: {found['waiting in slots'] / found['suspended']:.2f} x", flush=True)


if __name__ == "__main__":
    main()
