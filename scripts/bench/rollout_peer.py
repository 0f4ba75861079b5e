"""Our rollout against transformers' `generate`: the same prompts, lengths, precision and process, in turn.

    python scripts/bench/rollout_peer.py --model DIR [--samples 32] [--tokens 64] [--repeats 1]

DIR is a Hugging Face directory; PyTorch must be installed, its CPU build will do. Samples get the
lengths that the benchmark says, once all equal, once log-normal with about the same mean: ours by an end-of-sequence
token, the peer's by a stopping criterion. Three ways take turns: `generate` on 16 rows at a time, each batch to its
longest; ours through 16 slots; ours by a fast and a heavy worker of 8 slots each under `adaptive`. Nobody knows the
lengths beforehand. Counted are tokens of samples, not of rows that wait for others; all is compiled before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.records.sample import Prompt
from app.rollout.continuous_batching import ContinuousBatchGenerator
from app.rollout.sample_generator import SampleGenerator
from scripts.bench.forced_rollout import (
    LONGEST_OVER_MEAN,
    ForcedRollout,
    log_normal_lengths,
    machine,
    open_rollout,
    positive,
)
from settings.schema.rollout import SegmentSettings

try:
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"{error.name} is not installed: this benchmark compares with transformers' generate on PyTorch")

RESULTS = Path(__file__).parent / "results" / "rollout_peer.json"
ROWS = 16
PAD = 2


class StopsAt(transformers.StoppingCriteria):
    """A stopping criterion that ends row i after `lengths[i]` new tokens."""

    def __init__(self, prompt_length: int, lengths: Sequence[int]):
        self._ends = torch.as_tensor([prompt_length + length for length in lengths])

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] >= self._ends


class Peer:
    def __init__(self, model: str):
        torch.set_num_threads(os.cpu_count() or 1)
        transformers.logging.set_verbosity_error()
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: Sequence[Prompt], lengths: Sequence[int]) -> float:
        """Generates in left-padded batches of `ROWS`, and returns the seconds."""
        start = time.perf_counter()
        for first in range(0, len(lengths), ROWS):
            self._batch(prompts[first : first + ROWS], lengths[first : first + ROWS])
        return time.perf_counter() - start

    def _batch(self, prompts: Sequence[Prompt], lengths: Sequence[int]) -> None:
        longest = max(len(prompt.token_ids) for prompt in prompts)
        ids, mask = torch.full((len(prompts), longest), PAD), torch.zeros((len(prompts), longest), dtype=torch.long)
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt.token_ids) :] = torch.as_tensor(prompt.token_ids.astype(np.int64))
            mask[i, longest - len(prompt.token_ids) :] = 1
        stop = transformers.StoppingCriteriaList([StopsAt(longest, lengths)])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=PAD,
                max_new_tokens=max(lengths),
                stopping_criteria=stop,
            )
        assert out.shape[1] == longest + max(lengths)


def ours(rollout: ForcedRollout) -> dict[str, Callable[[], SampleGenerator]]:
    """Returns compiled workers without knowledge of earlier rollouts."""
    engine = rollout.new_engine(ROWS)
    engine.programs.compile(suspends=False, recomputes=False, truncates=False)
    print(f"compiled in {rollout.compile():.1f} s", flush=True)
    return {
        "slots": lambda: ContinuousBatchGenerator(engine, decode_text=lambda _: "", segment_rule=rollout.rule),
        "workers": lambda: rollout.workers("adaptive"),
    }


def compare(peer: Peer, rollout: ForcedRollout, *, repeats: int) -> Iterator[dict[str, Any]]:
    """Compares all ways for the lengths of each seed."""
    prompts = [prompt for prompt in rollout.prompts for _ in range(rollout.group_size)]
    made = ours(rollout)
    peer.generate(prompts[:ROWS], [2] * ROWS)
    for new in made.values():
        rollout.generate(new())
    for seed, lengths in enumerate(rollout.lengths):
        seconds: dict[str, list[float]] = {name: [] for name in ("transformers", *made)}
        for _ in range(repeats):
            seconds["transformers"].append(peer.generate(prompts, lengths))
            for name, new in made.items():
                seconds[name].append(rollout.generate(new(), seed=seed))
            print(f"lengths of mean {np.mean(lengths):.0f}, up to {max(lengths)}:", end="")
            print(*(f"{name} {taken[-1]:.2f} s" for name, taken in seconds.items()), sep=", ", flush=True)
        speed = {name: sum(lengths) / statistics.median(taken) for name, taken in seconds.items()}
        yield {
            "lengths": {"mean": float(np.mean(lengths)), "max": max(lengths)},
            "seconds": {name: [round(s, 3) for s in taken] for name, taken in seconds.items()},
            "tokens_per_s": {name: round(one, 1) for name, one in speed.items()},
            "times_transformers": {name: round(speed[name] / speed["transformers"], 3) for name in made},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--samples", type=positive, default=32)
    parser.add_argument("--group", type=positive, default=8, help="samples of a prompt")
    parser.add_argument("--tokens", type=positive, default=64, help="mean length of a sample")
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--overhead-steps", type=float, default=0.5, help="as `rollout.segment.overhead_steps`")
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.samples % options.group:
        parser.error(f"--samples: {options.samples} are no whole groups of --group {options.group}")
    drawn = log_normal_lengths(options.samples, group=options.group, mean=options.tokens, sigma=options.sigma)
    rollout = open_rollout(
        options.model,
        num_prompts=options.samples // options.group,
        lengths=[[options.tokens] * len(drawn), drawn],
        longest=LONGEST_OVER_MEAN * options.tokens,
        slots=[ROWS // 2] * 2,
        rule=SegmentSettings(min=1, overhead_steps=options.overhead_steps),
    )
    found = compare(Peer(options.model), rollout, repeats=options.repeats)
    result = {
        "model": Path(options.model).resolve().name,
        "dtype": "float32",
        "samples": len(drawn),
        "rows": ROWS,
        **dict(zip(("equal", "log-normal"), found, strict=True)),
        "torch": str(torch.__version__),
        "torch_threads": torch.get_num_threads(),
        "transformers": transformers.__version__,
        **machine(),
    }
    print(json.dumps(result, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
