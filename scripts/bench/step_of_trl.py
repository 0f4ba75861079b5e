"""Times the phases of TRL's GRPO step for `train_step.py`, on the same work as `step_of_grpo.py`; needs TRL, not grpo.

    python scripts/bench/step_of_trl.py --model DIR --rows FILE.jsonl --beta 0 --steps 3 --warmup 1

Among other settings, these differ from TRL's defaults: on a CPU, the dtype is float32 or `--dtype`; gradient
checkpointing is off, which is faster but needs more memory (`--checkpointing` turns it on); all samples are in one
update of `--micro-batches` micro-batches; and completions have exactly `workload.NEW_TOKENS` tokens. `--lora-rank`
trains adapters, like `model.lora` in grpo.
"""

# TRL is not among the packages of this project's environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
import trl
import workload
from datasets import Dataset

ON_GPU = torch.cuda.is_available()


class Stopwatch(transformers.TrainerCallback):
    """Records the seconds of each step, and of the watched methods of the trainer in each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._inside: dict[str, float] = defaultdict(float)
        self._start = 0.0
        self._score: float | None = None

    def watch(self, trainer: Any, method: str) -> None:
        """Replaces a method of the trainer with one that also records its seconds."""
        original: Callable[..., Any] = getattr(trainer, method)

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **options)
            finally:
                self._inside[method] += time.perf_counter() - start
                if method == "_prepare_inputs" and self._score is None:
                    # TRL uses this method for the reference during preparation and later for the policy loss.
                    self._score = self._inside["_get_per_token_logps_and_entropies"]

        setattr(trainer, method, timed)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._inside.clear()
        self._start, self._score = time.perf_counter(), None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if ON_GPU:
            torch.cuda.synchronize()
        assert self._score is not None, "TRL updated without preparing a batch before"
        step, inside = time.perf_counter() - self._start, self._inside
        rollout, update = inside["_generate_single_turn"], step - inside["_prepare_inputs"]
        self.steps.append({"rollout": rollout, "score": self._score, "update": update, "step": step})
        print(f"step {len(self.steps)}", {k: round(v, 2) for k, v in self.steps[-1].items()}, flush=True)


def main() -> None:
    parser = workload.parser_of(__doc__)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--micro-batches", type=int, default=1, help="of an update")
    parser.add_argument("--lora-rank", type=int, default=0, help="0: all weights are trained")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        train(options, stopwatch, folder)
    workload.report(
        stopwatch.steps[options.warmup :],
        peak_memory_bytes=torch.cuda.max_memory_allocated() if ON_GPU else workload.peak_memory_bytes(),
        versions={"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        threads=torch.get_num_threads(),
    )


def train(options: argparse.Namespace, stopwatch: Stopwatch, folder: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, padding_side="left")
    dtype, rank = getattr(torch, options.dtype), options.lora_rank
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear") if rank else None
    rows = workload.read_rows(options.rows)
    conversations = [
        {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows
    ]
    samples = workload.NUM_PROMPTS * workload.GROUP_SIZE
    settings = trl.GRPOConfig(
        output_dir=folder,
        use_cpu=not ON_GPU,
        bf16=ON_GPU or options.dtype == "bfloat16",
        gradient_checkpointing=options.checkpointing,
        beta=options.beta,
        learning_rate=workload.LEARNING_RATE,
        per_device_train_batch_size=samples // options.micro_batches,
        num_generations=workload.GROUP_SIZE,
        gradient_accumulation_steps=options.micro_batches,
        steps_per_generation=options.micro_batches,
        max_completion_length=workload.NEW_TOKENS,
        generation_kwargs={"min_new_tokens": workload.NEW_TOKENS},
        max_steps=options.warmup + options.steps,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(conversations),
        processing_class=tokenizer,
        callbacks=[stopwatch],
        peft_config=adapters,
    )
    for method in ("_generate_single_turn", "_get_per_token_logps_and_entropies", "_prepare_inputs"):
        stopwatch.watch(trainer, method)
    trainer.train()


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [workload.reward_of(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    main()
