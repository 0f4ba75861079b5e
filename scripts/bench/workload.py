"""Defines the work of grpo and TRL in `train_step.py`: GSM8K prompts, four samples of 64 tokens, one AdamW update.

The environment variables BENCH_PROMPTS, BENCH_GROUP_SIZE and BENCH_NEW_TOKENS change its size. This file uses only the
standard library, because it is also imported in an environment without grpo.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
from pathlib import Path

NUM_PROMPTS = int(os.environ.get("BENCH_PROMPTS", "4"))
GROUP_SIZE = int(os.environ.get("BENCH_GROUP_SIZE", "4"))
NEW_TOKENS = int(os.environ.get("BENCH_NEW_TOKENS", "64"))
MIN_PROMPT_LENGTH = 64
MAX_PROMPT_LENGTH = 128
"""Maximum number of tokens of a prompt, including the chat template."""
LEARNING_RATE = 1e-6

PHASES = ("rollout", "score", "update")
"""Phases whose seconds grpo and TRL report in addition to the seconds of the whole `step`."""

_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of the options that `train_step.py` passes to the scripts of grpo and TRL."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--rows", type=Path, required=True, help="JSON Lines of questions and answers")
    parser.add_argument("--beta", type=float, default=0.0, help="above 0: with a reference model")
    parser.add_argument("--steps", type=int, default=2, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    return parser


def read_rows(path: Path) -> list[dict[str, str]]:
    """Reads the questions and solutions that `train_step.py` has selected."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def reward_of(completion: str, answer: str) -> float:
    """Rewards 1 for a correct last number, 0.1 for another number, plus up to 0.05 that varies with the length."""
    numbers = _NUMBER.findall(completion)
    gold = answer.split("####")[-1].strip().replace(",", "")
    right = bool(numbers) and numbers[-1].replace(",", "").rstrip(".") == gold
    return (1.0 if right else 0.1 if numbers else 0.0) + 0.001 * (len(completion) % 50)


def peak_memory_bytes() -> int:
    """Returns the peak memory of this process plus, on Linux, of its running child processes (the reward workers)."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    return own + sum(map(_peak_of, map(int, children)))


def _peak_of(pid: int) -> int:
    # Not RUSAGE_CHILDREN: a process inherits the peak of the one that it was forked from.
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def report(steps: list[dict[str, float]], **facts: object) -> None:
    """Prints the results as one JSON object, which `train_step.py` reads from the last line of the output."""
    print(json.dumps({"steps": steps, **facts}), flush=True)
