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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Int32, Key
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

LEVELS = (1, 2)
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
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 24,
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


def training_rows(tokenizer: PreTrainedTokenizerFast) -> TokenBatch:
    """Every problem of the training split with its right answer: one micro-batch, one problem a row."""
    problems = make_problems(
        difficulty=LEVELS, operators=OPERATORS, num_problems=ALL_PROBLEMS, split="train", seed=0
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
    return jax.tree.map(lambda x: x[0], batch)


def train(
    definition: DecoderDefinition, rows: TokenBatch, *, seed: int, steps: int, batch_rows: int, learning_rate: float
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
    def step(params: Params, moments: optax.OptState, chosen: Int32[Array, "R"]) -> tuple:
        batch = jax.tree.map(lambda x: jnp.asarray(x)[chosen], rows)
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    params = definition.initialise(seed)
    moments = optimizer.init(params)
    rng = np.random.default_rng(seed)
    for index in range(1, steps + 1):
        params, moments, value = step(params, moments, rng.integers(len(rows.mask), size=batch_rows))
        if index % 100 == 0 or index == steps:
            print(f"step {index} of {steps}: loss {float(value):.3f}", flush=True)
    return params
