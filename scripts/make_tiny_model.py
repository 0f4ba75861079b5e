"""Makes the starting weights of the quickstart: a tiny decoder that adds numbers but mostly forgets to carry.

    python scripts/make_tiny_model.py --out app/model/builtin/tiny

The decoder is trained on the training split of `builtin:arithmetic`. In 30 % of the examples the answer is correct; in
70 % it has a beginner's mistake: every column is added separately, without carries (`47 + 38 = 75`, `60 + 70 = 30`).
The resulting model writes one integer and stops. Its most likely answer ignores the carries; some sampled answers do
carry, though they may contain other errors. Reinforcement learning then makes adding with carries common and more
accurate; the model does not learn addition from scratch.
This script never reads the held-out split, but the fraction of mistakes and the number of steps were chosen with the
held-out results of trial runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jaxtyping import Array
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from app.batching.forward_passes import row_logprobs
from app.batching.micro_batch_plan import MicroBatch, RowShape
from app.batching.token_batch import TokenBatch, pack_tokens
from app.model.decoder import DecoderDefinition, Params, flatten_by_path
from app.model.io.families import architecture_from_config
from app.model.io.hf_weights import expected_tensors
from app.prompts.arithmetic import make_problems
from app.records.sample import Prompt, Sample

LEVEL_SHARES = {2: 0.4, 3: 0.6}
"""Maps a difficulty level to its fraction of the training rows."""
RIGHT_SHARE = 0.3
NUM_PROBLEMS = 40_000
LEARNING_RATE = 3e-3

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
CONTROL_TOKENS = (PAD, UNKNOWN, END, "<|system|>", "<|user|>", "<|assistant|>")
CHARACTERS = "0123456789+-*=?"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(CONTROL_TOKENS) + len(CHARACTERS),
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": CONTROL_TOKENS.index(END),
    "pad_token_id": CONTROL_TOKENS.index(PAD),
    "torch_dtype": "bfloat16",
}


def make_tokenizer(
    control_tokens: Sequence[str] = CONTROL_TOKENS, characters: str = CHARACTERS
) -> PreTrainedTokenizerFast:
    """Returns a tokenizer that drops spaces and makes each other character a token: `47 + 38 = ?` has seven tokens."""
    vocabulary = {token: i for i, token in enumerate((*control_tokens, *characters))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.normalizer = normalizers.Replace(Regex(r"\s"), "")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=PAD, unk_token=UNKNOWN, chat_template=CHAT_TEMPLATE
    )


def without_carries(left: int, right: int) -> int:
    """Adds each column of two numbers without carries: 47 + 38 -> 75, 60 + 70 -> 30."""
    columns = zip(f"{left:03}", f"{right:03}", strict=True)
    return int("".join(str((int(a) + int(b)) % 10) for a, b in columns))


def training_rows(
    tokenizer: PreTrainedTokenizerFast, *, num_problems: int, right_share: float = RIGHT_SHARE
) -> tuple[TokenBatch, np.ndarray]:
    """Returns rows of training problems with correct or wrong answers, and the probability of drawing each row."""
    problems = make_problems(
        difficulty=tuple(LEVEL_SHARES), operators=("+",), num_problems=num_problems, split="train", seed=0
    )
    levels = np.array([row.extra["difficulty"] for row in problems.rows])
    samples, probabilities = [], []
    for row, level in zip(problems.rows, levels, strict=True):
        chat = [{"role": "user", "content": str(row.prompt)}]
        prompt_ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        prompt = Prompt(row.uid, np.array(prompt_ids, np.int32), row.prompt, row.answer, row.extra)
        left, _, right = str(row.prompt).split()[:3]
        slip = str(without_carries(int(left), int(right)))
        for answer, share in ((row.answer, right_share), (slip, 1 - right_share)):
            ids = np.array(tokenizer.encode(f"{answer}{END}"), np.int32)
            samples.append(Sample(prompt, 0, 0, ids, f"{answer}", np.zeros(len(ids), np.float32), "stop", 0))
            probabilities.append(share * LEVEL_SHARES[level] / np.sum(levels == level))
    return pack_rows([(sample,) for sample in samples]), np.array(probabilities)


def pack_rows(rows: Sequence[Sequence[Sample]]) -> TokenBatch:
    """Packs the samples of each item of `rows` into one row; all rows have equal length."""
    samples = list(chain.from_iterable(rows))
    completion = max(sum(len(s.completion_ids) for s in row) for row in rows)
    total = max(sum(len(s.prompt.token_ids) + len(s.completion_ids) for s in row) for row in rows)
    numbers = iter(range(len(samples)))
    segments = tuple(tuple((next(numbers),) for _ in row) for row in rows)
    return pack_tokens(samples, MicroBatch(segments, RowShape(total, completion)))


def train(
    definition: DecoderDefinition,
    rows: TokenBatch,
    probabilities: np.ndarray,
    *,
    seed: int,
    num_steps: int,
    num_rows: int,
) -> Params:
    """Trains from random weights for `num_steps` of AdamW on the cross-entropy of the tokens in the loss.

    Args:
        probabilities: probability of drawing each row.
        num_rows: rows per step.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, num_steps // 10, num_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))

    def loss(params: Params, batch: TokenBatch) -> Array:
        logprobs, *_ = row_logprobs(
            definition.bind(params),
            batch,
            temperature=1.0,
            dtype=jnp.dtype(jnp.float32),
            remat="none",
            logits_chunk=batch.targets.size,
        )
        return -jnp.sum(logprobs * batch.loss_mask) / jnp.sum(batch.loss_mask)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, moments: optax.OptState, batch: TokenBatch) -> tuple[Params, optax.OptState, Array]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return cast(Params, optax.apply_updates(params, updates)), moments, value

    params = definition.initialise(seed)
    moments = optimizer.init(params)
    rng = np.random.default_rng(seed)
    for index in range(1, num_steps + 1):
        chosen = rng.choice(len(probabilities), size=num_rows, p=probabilities)
        params, moments, value = step(params, moments, jax.tree.map(itemgetter(chosen), rows))
        if index % 100 == 0 or index == num_steps:
            print(f"step {index} of {num_steps}: loss {float(value):.3f}", flush=True)
    return params


def write_weights(directory: Path, definition: DecoderDefinition, params: Params) -> None:
    """Writes `model.safetensors` in bfloat16 with the tensor names and layout of Hugging Face."""
    flat = flatten_by_path(jax.device_get(params))
    tensors = {}
    for entry in expected_tensors(definition):
        value = flat[entry.path] if entry.layer is None else flat[entry.path][entry.layer]
        if entry.path[-1] == "kernel":
            value = value.reshape(entry.file_shape[::-1]).T
        tensors[entry.name] = np.ascontiguousarray(value).astype(ml_dtypes.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer_and_config(directory: Path, config: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes config.json, generation_config.json and the tokenizer files of a Hugging Face directory."""
    generation = {name: config[name] for name in ("eos_token_id", "pad_token_id")}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(directory, save_jinja_files=False)


def main(
    config: dict[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    make_rows: Callable[[PreTrainedTokenizerFast], tuple[TokenBatch, np.ndarray]],
    *,
    num_steps: int,
    num_rows: int,
) -> None:
    """Trains on the rows of `make_rows`, `num_rows` per step, and writes the model to `--out`."""
    parser = argparse.ArgumentParser(description="Makes the starting weights of a built-in model.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=num_steps)
    arguments = parser.parse_args()
    definition = DecoderDefinition.create(architecture_from_config(config))
    params = train(definition, *make_rows(tokenizer), seed=arguments.seed, num_steps=arguments.steps, num_rows=num_rows)
    write_weights(arguments.out, definition, params)
    write_tokenizer_and_config(arguments.out, config, tokenizer)
    print(f"{definition.num_parameters:,} weights in {arguments.out}")


if __name__ == "__main__":
    main(CONFIG, make_tokenizer(), partial(training_rows, num_problems=NUM_PROBLEMS), num_steps=6000, num_rows=256)
