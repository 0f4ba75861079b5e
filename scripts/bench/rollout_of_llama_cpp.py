"""Times llama.cpp for `rollout_peer.py` on samples of given lengths; needs llama-cpp-python, but not grpo.

    python scripts/bench/rollout_of_llama_cpp.py FILE.gguf ROWS < WORK

Each line of WORK is a JSON object, `{"prompts": [[id, ...], ...], "lengths": [number, ...]}`; the script prints the
seconds for each line. Each `llama_decode` call decodes ROWS samples; when one ends, the next sample takes its row.
"""

# llama-cpp-python is not among the packages of this project's environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from typing import Any

import llama_cpp

LONGEST = 1024
"""Maximum number of tokens in a row."""


def load(path: str, rows: int) -> Any:
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.use_extra_bufts = False  # Virtual machines may announce matrix units (AMX) and crash in them.
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max, params.n_ctx, params.n_batch = rows, rows * LONGEST, rows * LONGEST
    params.n_threads = params.n_threads_batch = os.cpu_count() or 1
    return llama_cpp.llama_init_from_model(llama_cpp.llama_model_load_from_file(path.encode(), model_params), params)


def generate(context: Any, rows: int, prompts: list[list[int]], lengths: list[int]) -> float:
    """Generates a sample of each length at temperature 1, and returns the seconds that this took."""
    sampler = llama_cpp.llama_sampler_init_dist(0)
    memory, batch = llama_cpp.llama_get_memory(context), llama_cpp.llama_batch_init(rows * LONGEST, 0, 1)
    waiting = deque(zip(prompts, lengths, strict=True))
    new, past, left = ([[] for _ in range(rows)], [0] * rows, [0] * rows)
    start = time.perf_counter()
    while waiting or any(left):
        batch.n_tokens, last = 0, {}
        for row in range(rows):
            if not left[row]:
                if not waiting:
                    continue
                llama_cpp.llama_memory_seq_rm(memory, row, -1, -1)
                past[row], (new[row], left[row]) = 0, waiting.popleft()
            for token in new[row]:
                i, batch.n_tokens = batch.n_tokens, batch.n_tokens + 1
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, past[row], 1, row
                batch.logits[i], past[row] = False, past[row] + 1
            last[row] = batch.n_tokens - 1
            batch.logits[last[row]] = True
        if llama_cpp.llama_decode(context, batch):
            sys.exit("llama_decode failed")
        for row, i in last.items():
            new[row], left[row] = [llama_cpp.llama_sampler_sample(sampler, context, i)], left[row] - 1
    llama_cpp.llama_batch_free(batch)
    return time.perf_counter() - start


def main() -> None:
    path, rows = sys.argv[1], int(sys.argv[2])
    context = load(path, rows)
    for line in sys.stdin:
        print(generate(context, rows, **json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
