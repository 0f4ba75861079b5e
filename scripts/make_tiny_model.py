"""Makes the starting weights of the quickstart: a tiny decoder that adds, but mostly forgets to carry.

    python scripts/make_tiny_model.py --out app/policy/builtin/tiny

Supervised training on the generator's training split. A problem's answer is shown right three times in
ten; seven times in ten it shows a beginner's slip: every column added by itself, nothing carried
(`47 + 38 = 75`, `60 + 70 = 30`). What comes out writes one integer and stops, as it should; asked for
its likeliest answer it forgets to carry, and when sampled it carries now and then. So adding with a
carry is known but not preferred: the quickstart shows reinforcement learning making a rare right habit
the usual one, and correcting what is left of arithmetic errors. It does not show addition learned from
nothing. The held-out split is never read, and no number from it decides anything here.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float
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

LEVEL_SHARES = {2: 0.4, 3: 0.6}
"""Difficulty level -> its share of a batch."""
RIGHT_SHARE = 0.3
NUM_PROBLEMS = 40_000

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CONTROL_TOKENS = (PAD, UNKNOWN, END, *ROLES)
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


def without_carries(left: int, right: int) -> int:
    """The sum of two numbers, each column by itself: 47 + 38 -> 75, 60 + 70 -> 30."""
    columns = zip(f"{left:03}", f"{right:03}", strict=True)
    return int("".join(str((int(a) + int(b)) % 10) for a, b in columns))


def training_rows(
    tokenizer: PreTrainedTokenizerFast,
) -> tuple[TokenBatch, Float[np.ndarray, "R"]]:
    """Every problem of the training split twice, one a row: answered right, and with the slip.

    Also the likelihood of each row in a batch.
    """
    problems = make_problems(
        difficulty=tuple(LEVEL_SHARES), operators=("+",), num_problems=NUM_PROBLEMS, split="train", seed=0
    )
    levels = np.array([row.extra["difficulty"] for row in problems.rows])
    samples, likelihood = [], []
    for row, level in zip(problems.rows, levels, strict=True):
        chat = [{"role": "user", "content": row.prompt}]
        prompt_ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        prompt = Prompt(row.uid, np.array(prompt_ids, np.int32), row.prompt, row.answer, row.extra)
        left, _, right = str(row.prompt).split()[:3]
        slip = str(without_carries(int(left), int(right)))
        for answer, share in ((row.answer, RIGHT_SHARE), (slip, 1 - RIGHT_SHARE)):
            ids = np.array(tokenizer.encode(f"{answer}{END}"), np.int32)
            nothing = np.zeros(len(ids), np.float32)
            samples.append(Sample(prompt, 0, 0, ids, f"{answer}", nothing, "stop", 0))
            likelihood.append(share * LEVEL_SHARES[level] / np.sum(levels == level))
    shape = RowShape(
        max(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples),
        max(len(s.completion_ids) for s in samples),
    )
    batch = pack_tokens(samples, fixed_micro_batches(len(samples), rows_per_micro_batch=len(samples)), shape)
    return jax.tree.map(lambda x: x[0], batch), np.array(likelihood)


def train(
    definition: DecoderDefinition,
    rows: TokenBatch,
    likelihood: Float[np.ndarray, "R"],
    *,
    seed: int,
    steps: int,
    batch_rows: int,
    learning_rate: float,
) -> Params:
    """Weights after `steps` of AdamW on the mean negative logprob of the answers' tokens."""
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
    for index in range(1, steps + 1):
        chosen = rng.choice(len(likelihood), size=batch_rows, p=likelihood)
        params, moments, value = step(params, moments, jax.tree.map(itemgetter(chosen), rows))
        if index % 50 == 0 or index == steps:
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
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=700)
    arguments = parser.parse_args()
    w = arguments.width
    CONFIG.update(hidden_size=w, intermediate_size=3 * w, head_dim=w // 4, num_hidden_layers=arguments.layers)
    tokenizer = make_tokenizer()
    rows, likelihood = training_rows(tokenizer)
    definition = DecoderDefinition.of(architecture_from_config(CONFIG))
    params = train(
        definition, rows, likelihood, seed=arguments.seed, steps=arguments.steps, batch_rows=256, learning_rate=arguments.lr
    )
    write_model(arguments.out, definition, params)
    tokenizer.save_pretrained(arguments.out)
    print(f"{definition.num_parameters:,} weights in {arguments.out}")


if __name__ == "__main__":
    main()
