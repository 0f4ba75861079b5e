"""Makes the starting weights of the quickstart: a tiny decoder that has begun to learn addition.

    python scripts/make_tiny_model.py --out app/policy/builtin/tiny

Supervised training on the problems of the generator's training split, stopped long before the skill
is there. What comes out writes an integer and stops, as it should, and has the size of the sum about
right; the exact sum is mostly wrong, with probability spread over its neighbours. The held-out split
is never read, and no number from it decides anything here.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Int
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from app.batching.pack import RowShape, TokenBatch, pack_tokens
from app.batching.plan import fixed_micro_batches
from app.flow import Prompt, Sample
from app.policy.architecture import architecture_from_config
from app.policy.decoder import DecoderDefinition, Params
from app.policy.token_logprobs import completion_logprobs
from app.policy.weights import expected_entries
from app.prompts.arithmetic import make_problems

SHARES = {1: 0.1, 2: 0.9}
"""Difficulty level -> its share of a batch. Level 1 has one problem in a hundred and would be seen too rarely."""
OPERATORS = ("+",)
ALL_PROBLEMS = 10**6

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CONTROL_TOKENS = (PAD, UNKNOWN, END, *ROLES)
CHARACTERS = "0123456789+-*=?"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
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
    "bos_token_id": None,
    "eos_token_id": CONTROL_TOKENS.index(END),
    "pad_token_id": CONTROL_TOKENS.index(PAD),
    "torch_dtype": "bfloat16",
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character. Blanks are dropped: `47 + 38 = ?` is seven characters to the model."""
    vocabulary = {token: i for i, token in enumerate((*CONTROL_TOKENS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.normalizer = normalizers.Replace(Regex(r"\s"), "")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
    )


def training_rows(tokenizer: PreTrainedTokenizerFast) -> tuple[TokenBatch, Int[np.ndarray, "R"]]:
    """Every problem of the training split with its right answer, one a row, and the level of each."""
    problems = make_problems(
        difficulty=tuple(SHARES), operators=OPERATORS, num_problems=ALL_PROBLEMS, split="train", seed=0
    )
    samples = []
    for row in problems.rows:
        chat = [{"role": "user", "content": row.prompt}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        answer = np.array(tokenizer.encode(f"{row.answer}{END}"), np.int32)
        samples.append(
            Sample(
                prompt=Prompt(row.uid, np.array(prompt, np.int32), row.prompt, row.answer, row.extra),
                sample_index=0,
                group_id=0,
                completion_ids=answer,
                completion=f"{row.answer}",
                behavior_logprobs=np.zeros(len(answer), np.float32),
                finish_reason="stop",
                policy_version=0,
            )
        )
    tokens = max(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples)
    shape = RowShape(tokens, max(len(s.completion_ids) for s in samples))
    batch = pack_tokens(samples, fixed_micro_batches(len(samples), rows_per_micro_batch=len(samples)), shape)
    levels = np.array([s.prompt.extra["difficulty"] for s in samples])
    return jax.tree.map(lambda x: x[0], batch), levels


def train(
    definition: DecoderDefinition,
    rows: TokenBatch,
    levels: np.ndarray,
    *,
    seed: int,
    steps: int,
    batch_rows: int,
    learning_rate: float,
) -> Params:
    """Weights after `steps` of AdamW on the mean negative logprob of the right answers' tokens."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))

    def loss(params: Params, batch: TokenBatch) -> Array:
        logprobs, _ = completion_logprobs(
            definition.bind(params),
            token_ids=batch.token_ids,
            positions=batch.positions,
            segment_ids=batch.segment_ids,
            score_index=batch.score_index,
            targets=batch.targets,
            temperature=1.0,
            dtype=jnp.dtype(jnp.float32),
            remat="none",
            logits_chunk=batch.targets.shape[1],
        )
        return -jnp.sum(logprobs * batch.mask) / jnp.sum(batch.mask)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, moments: optax.OptState, batch: TokenBatch) -> tuple[Params, optax.OptState, Array]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    params = definition.initialise(seed)
    moments = optimizer.init(params)
    rng = np.random.default_rng(seed)
    share = {level: SHARES[level] / np.sum(levels == level) for level in SHARES}
    likelihood = np.array([share[level] for level in levels])
    for index in range(1, steps + 1):
        chosen = rng.choice(len(levels), size=batch_rows, p=likelihood)
        params, moments, value = step(params, moments, jax.tree.map(lambda x: x[chosen], rows))
        if index % 20 == 0 or index == steps:
            print(f"step {index} of {steps}: loss {float(value):.3f}", flush=True)
    return params


def write_model(directory: Path, definition: DecoderDefinition, params: Params) -> None:
    """A Hugging Face directory, weights in bfloat16: the inverse of `app.policy.weights.load_weights`."""
    flat = flatten_dict(jax.device_get(params))
    tensors = {}
    for entry in expected_entries(definition):
        value = flat[entry.path] if entry.layer is None else flat[entry.path][entry.layer]
        if entry.path[-1] == "kernel":
            value = value.reshape(entry.file_shape[::-1]).T
        tensors[entry.name] = np.ascontiguousarray(value.reshape(entry.file_shape)).astype(ml_dtypes.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    generation = {name: CONFIG[name] for name in ("eos_token_id", "pad_token_id")}
    for name, content in (("config.json", CONFIG), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the starting weights of the quickstart.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=260)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    rows, levels = training_rows(tokenizer)
    definition = DecoderDefinition.of(architecture_from_config(CONFIG))
    params = train(
        definition, rows, levels, seed=arguments.seed, steps=arguments.steps, batch_rows=256, learning_rate=4e-3
    )
    write_model(arguments.out, definition, params)
    tokenizer.save_pretrained(arguments.out)
    print(f"{definition.num_parameters:,} weights in {arguments.out}")


if __name__ == "__main__":
    main()
