"""Compares the speed of grpo's rollouts and transformers' `generate` on equal prompts, lengths and precision.

    python scripts/bench/rollout_peer.py --model MODEL [--samples 32] [--rows 16] [--tokens 64] [--repeats 1]
        [--dtype float32] [--no-workers] [--llama-python PYTHON --gguf FILE]

MODEL is a Hugging Face directory, or a name such as Qwen2.5-1.5B for random weights of its sizes. PyTorch must be
installed, and runs on a GPU if JAX does (with XLA_PYTHON_CLIENT_PREALLOCATE=false, so that both have memory). Samples
have prescribed lengths, once all equal and once log-normal with about the same mean: our samples end with an EOS token,
those of `generate` by a stopping criterion. Three methods alternate: `generate` on `--rows` rows at a time, each batch
until its longest sample ends; `--rows` decode slots; and a fast and a heavy worker under `adaptive`, each with half of
the slots. If PYTHON is the interpreter of an environment with llama-cpp-python and FILE the model as GGUF, llama.cpp is
the fourth, with its own continuous batching and the precision of FILE. No method knows the lengths beforehand. Tokens
of rows that wait for others are not counted, and everything is compiled before the timing.

The upper bound for slots with equal lengths is the speed at which each decode step reads the weights and the KV cache
once, at the bandwidth of a plain sum over an array.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from app.records.sample import Prompt
from app.rollout.engine.continuous_batching import ContinuousBatchGenerator
from app.rollout.engine.sample_generator import SampleGenerator
from scripts.bench import ceilings
from scripts.bench.forced_rollout import (
    LONGEST_OVER_MEAN,
    ForcedRollout,
    log_normal_lengths,
    machine,
    open_rollout,
    positive,
)
from scripts.bench.shapes import QWEN2_5
from settings.schema.rollout import SegmentSettings

try:
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"{error.name} is not installed: this benchmark compares with transformers' generate on PyTorch")

RESULTS = Path(__file__).parent / "results" / "rollout_peer.json"
PAD = 2


class StopsAt(transformers.StoppingCriteria):
    """A stopping criterion that ends row i after `lengths[i]` new tokens."""

    def __init__(self, prompt_length: int, lengths: Sequence[int]):
        self._ends = torch.as_tensor([prompt_length + length for length in lengths])

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] >= self._ends.to(input_ids.device)


class Peer:
    def __init__(self, model: str, num_rows: int, dtype: str):
        torch.set_num_threads(os.cpu_count() or 1)
        transformers.logging.set_verbosity_error()
        loader: Any = transformers.AutoModelForCausalLM
        self._num_rows, self._device = num_rows, "cuda" if jax.default_backend() == "gpu" else "cpu"
        if model in QWEN2_5:
            with torch.device(self._device):
                self._model: Any = loader.from_config(transformers.AutoConfig.for_model(**QWEN2_5[model]))
        else:
            self._model = loader.from_pretrained(model)
        self._model = self._model.to(self._device, getattr(torch, dtype)).eval()
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: Sequence[Prompt], lengths: Sequence[int]) -> float:
        start = time.perf_counter()
        for first in range(0, len(lengths), self._num_rows):
            self._batch(prompts[first : first + self._num_rows], lengths[first : first + self._num_rows])
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
                ids.to(self._device),
                attention_mask=mask.to(self._device),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=PAD,
                max_new_tokens=max(lengths),
                stopping_criteria=stop,
            )
        assert out.shape[1] == longest + max(lengths)


class LlamaCpp:
    """Runs llama.cpp in a separate process with `num_rows` rows at a time."""

    def __init__(self, python: str, gguf: Path, num_rows: int):
        script = Path(__file__).with_name("rollout_of_llama_cpp.py")
        command = [python, str(script), str(gguf), str(num_rows)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, text=True, **pipes)

    def generate(self, prompts: Sequence[Prompt], lengths: Sequence[int]) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        work = {"prompts": [prompt.token_ids.tolist() for prompt in prompts], "lengths": list(map(int, lengths))}
        print(json.dumps(work), file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


def ours(rollout: ForcedRollout, num_rows: int, *, workers: bool) -> dict[str, Callable[[], SampleGenerator]]:
    """Compiles our methods; maps their names to functions that make a generator which knows no earlier rollouts."""
    engine, start = rollout.new_engine(num_rows), time.perf_counter()
    engine.programs.compile(suspends=False, recomputes=False, truncates=False)
    ways: dict[str, Callable[[], SampleGenerator]] = {
        "slots": lambda: ContinuousBatchGenerator(
            engine, decode_text=lambda _: "", stop_text=lambda _: "", segment_rule=rollout.rule
        )
    }
    if workers:
        rollout.compile()
        ways["workers"] = lambda: rollout.workers("adaptive")
    print(f"compiled in {time.perf_counter() - start:.1f} s", flush=True)
    return ways


def floor_tokens_per_s(rollout: ForcedRollout, num_rows: int, num_tokens: int) -> float:
    """Returns the tokens/s that rows of `num_tokens` new tokens would reach if only reading memory took time."""
    arch = rollout.definition.architecture
    prompt = sum(len(prompt.token_ids) for prompt in rollout.prompts) / len(rollout.prompts)
    of_token = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * rollout.dtype.itemsize
    weights = sum(x.nbytes for x in jax.tree.leaves(rollout.weights))
    if not arch.tied_embeddings:
        weights -= (
            arch.vocab_size * arch.model_dim * rollout.dtype.itemsize
        )  # embeddings are looked up, so the matrix is not read
    read_bytes = weights + num_rows * (prompt + num_tokens / 2) * of_token
    return num_rows / (read_bytes / ceilings.read_bytes_per_s())


def compare(
    peers: Mapping[str, Peer | LlamaCpp], rollout: ForcedRollout, num_rows: int, *, workers: bool, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yields the figures of all methods: first for equal, then for log-normal lengths."""
    prompts = [prompt for prompt in rollout.prompts for _ in range(rollout.group_size)]
    made = ours(rollout, num_rows, workers=workers)
    for peer in peers.values():
        peer.generate(prompts[:num_rows], [2] * num_rows)
    for new in made.values():
        rollout.generate(new())
    for seed, lengths in enumerate(rollout.lengths):
        seconds: dict[str, list[float]] = {name: [] for name in (*peers, *made)}
        for _ in range(repeats):
            for name, peer in peers.items():
                seconds[name].append(peer.generate(prompts, lengths))
            for name, new in made.items():
                seconds[name].append(rollout.generate(new(), seed=seed))
            print(f"lengths of mean {np.mean(lengths):.0f}, up to {max(lengths)}:", end="")
            print(*(f"{name} {taken[-1]:.2f} s" for name, taken in seconds.items()), sep=", ", flush=True)
        speed = {name: sum(lengths) / statistics.median(taken) for name, taken in seconds.items()}
        yield {
            "lengths": {"mean": float(np.mean(lengths)), "max": max(lengths)},
            "seconds": {name: [round(s, 3) for s in taken] for name, taken in seconds.items()},
            "tokens_per_s": {name: round(one, 1) for name, one in speed.items()},
            **{f"times_{peer}": {name: round(speed[name] / speed[peer], 3) for name in made} for peer in peers},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory, or a name for random weights")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--samples", type=positive, default=32)
    parser.add_argument("--rows", type=positive, default=16, help="rows that are generated together")
    parser.add_argument("--llama-python", help="interpreter with llama-cpp-python")
    parser.add_argument("--gguf", type=Path, help="the model for llama.cpp")
    parser.add_argument("--no-workers", action="store_true", help="omits the fast and heavy workers")
    parser.add_argument("--group", type=positive, default=8, help="samples of a prompt")
    parser.add_argument("--tokens", type=positive, default=64, help="mean length of a sample")
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.rows % 2 and not options.no_workers:
        parser.error(f"--rows: {options.rows} cannot be halved for two workers; use --no-workers")
    if options.samples % options.group:
        parser.error(f"--samples: {options.samples} cannot be divided into groups of --group {options.group}")
    group, mean, longest = options.group, options.tokens, LONGEST_OVER_MEAN * options.tokens
    drawn = log_normal_lengths(options.samples, group=group, mean=mean, sigma=options.sigma, longest=longest)
    rollout = open_rollout(
        options.model,
        num_prompts=options.samples // group,
        lengths=[[mean] * len(drawn), drawn],
        longest=longest,
        slots=[options.rows // 2] * 2,
        rule=SegmentSettings(min=1),
        dtype=options.dtype,
    )
    peers: dict[str, Peer | LlamaCpp] = {"transformers": Peer(options.model, options.rows, options.dtype)}
    if options.llama_python:
        peers["llama.cpp"] = LlamaCpp(options.llama_python, options.gguf, options.rows)
    found = compare(peers, rollout, options.rows, workers=not options.no_workers, repeats=options.repeats)
    result = {
        "model": Path(options.model).resolve().name,
        "dtype": options.dtype,
        "samples": len(drawn),
        "rows": options.rows,
        **dict(zip(("equal", "log-normal"), found, strict=True)),
        "floor_tokens_per_s": round(floor_tokens_per_s(rollout, options.rows, options.tokens), 1),
        "torch": str(torch.__version__),
        "torch_threads": torch.get_num_threads(),
        "transformers": transformers.__version__,
        **machine(),
    }
    print(json.dumps(result, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
