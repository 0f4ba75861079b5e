"""Sampling of tokens from logits, and the PRNG keys for it.

A key depends only on (run seed, policy version, prompt uid, sample index, position), not on batch row, device, host or
order. A sample therefore does not depend on the samples that are generated together with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Key, UInt32

from app.mesh.axis_rules import constrain, current_device, spread_rows
from app.model.decoder import LMHead
from app.model.token_logprobs import scaled_logits
from app.records.sample import DROPPED_PREFIX
from app.rollout.sampling.truncation import kept_tokens


class SamplingRules(NamedTuple):
    """Sampling parameters. They are traced, so new values never trigger a recompilation."""

    temperature: float
    """Divisor of the logits; 0 = greedy."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        """Whether any token can be excluded, which requires `sample_tokens_truncated`."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class SampledTokens(NamedTuple):
    token_ids: Int32[Array, "B"]
    logprobs: Float32[Array, "B"]
    """Logprobs of the tokens under the untruncated distribution at the sampling temperature (1 if greedy)."""
    kept_mass_logs: Float32[Array, "B"]
    """Logarithm of the probability mass that truncation keeps, for each row."""


FINISH_NON_FINITE = f"{DROPPED_PREFIX}non-finite logits"
"""Finish reason of a sample whose next token cannot be sampled, because its logits are NaN or infinite."""


BLOCK_SIZE, MIN_BLOCKS = 512, 16
"""Tokens per block of the vocabulary, and the number of full blocks from which `_draw_by_blocks` is used."""

Sampler = Callable[[Array, SamplingRules, Array], SampledTokens]


def hash_uids(uids: Sequence[str]) -> UInt32[np.ndarray, "B 2"]:
    """Returns a stable 64-bit hash of each uid, as two words."""
    digests = b"".join(hashlib.blake2b(uid.encode(), digest_size=8).digest() for uid in uids)
    return np.frombuffer(digests, np.uint32).reshape(-1, 2)


def sample_key(
    seed: Int32[Array, ""],
    policy_version: Int32[Array, ""],
    uid_hash: UInt32[Array, "2"],
    sample_index: Int32[Array, ""],
) -> Key[Array, ""]:
    """Returns the PRNG key of a sample; `fold_in` with a position gives the key of that token."""
    key = jax.random.key(seed)
    for number in (policy_version, uid_hash[0], uid_hash[1], sample_index):
        key = jax.random.fold_in(key, number)
    return key


def gumbel_noise(keys: Key[Array, "B"], rules: SamplingRules, num_tokens: int) -> Float32[Array, "B V"]:
    """Returns noise such that argmax(logits + noise) is a sample of softmax(logits); zeros if greedy.

    Source: Gumbel 1954.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (num_tokens,), jnp.float32))(keys)
    return jnp.where(jnp.asarray(rules.temperature) == 0, 0.0, noise)


def sample_tokens(logits: Float32[Array, "B V"], rules: SamplingRules, keys: Key[Array, "B"]) -> SampledTokens:
    """Samples from softmax(logits) over the whole vocabulary; `logits` are already divided by the temperature."""
    token_ids, chosen = _draw(logits, logits, rules, keys)
    return SampledTokens(token_ids, chosen - jax.nn.logsumexp(logits, axis=-1), jnp.zeros_like(chosen))


def sample_tokens_truncated(
    logits: Float32[Array, "B V"], rules: SamplingRules, keys: Key[Array, "B"]
) -> SampledTokens:
    """Samples from the tokens that `kept_tokens` keeps; `logits` are already divided by the temperature."""
    logits = constrain(logits, spread_rows(len(logits)), "tokens")
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    probabilities = jnp.exp(logits - log_normalizer[:, None])
    top_k, top_p, min_p = jnp.asarray(rules.top_k), jnp.asarray(rules.top_p), jnp.asarray(rules.min_p)
    kept = kept_tokens(logits, probabilities, top_k, top_p, min_p)
    token_ids, chosen = _draw(logits, jnp.where(kept, logits, -jnp.inf), rules, keys)
    kept_mass = jnp.sum(jnp.where(kept, probabilities, 0.0), axis=-1)
    return SampledTokens(token_ids, chosen - log_normalizer, jnp.log(kept_mass))


def _draw(
    logits: Float32[Array, "B V"], candidates: Float32[Array, "B V"], rules: SamplingRules, keys: Key[Array, "B"]
) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    """Samples from softmax(candidates); returns the tokens and their logits."""
    vocab_size = candidates.shape[-1]
    if current_device()[0] == "cpu" and vocab_size >= MIN_BLOCKS * BLOCK_SIZE:
        token_ids = _draw_by_blocks(candidates, rules, keys)
    else:
        token_ids = jnp.argmax(candidates + gumbel_noise(keys, rules, vocab_size), axis=-1).astype(jnp.int32)
    return token_ids, jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0]


def _draw_by_blocks(
    candidates: Float32[Array, "B V"], rules: SamplingRules, keys: Key[Array, "B"]
) -> Int32[Array, "B"]:
    """Samples a block of the vocabulary by its mass, then a token of this block, with few random numbers.

    On a CPU, random numbers for a vocabulary of 150,000 take a third of the decoding time of a 0.5B model.
    """
    num_blocks = -(-candidates.shape[-1] // BLOCK_SIZE)
    padding = (0, 0), (0, num_blocks * BLOCK_SIZE - candidates.shape[-1])
    blocks = jnp.pad(candidates, padding, constant_values=-jnp.inf).reshape(-1, num_blocks, BLOCK_SIZE)
    highest = blocks.max(axis=-1)
    masses = jax.nn.logsumexp(blocks, axis=-1)
    noise = gumbel_noise(keys, rules, num_blocks + BLOCK_SIZE)
    scores = jnp.where(jnp.asarray(rules.temperature) == 0, highest, masses + noise[:, :num_blocks])
    chosen = jnp.argmax(scores, axis=-1)
    inside = jnp.take_along_axis(blocks, chosen[:, None, None], axis=1)[:, 0]
    token_ids = chosen * BLOCK_SIZE + jnp.argmax(inside + noise[:, num_blocks:], axis=-1)
    return token_ids.astype(jnp.int32)


def draw_tokens(
    sampler: Sampler,
    hidden: Float[Array, "B D"],
    head: LMHead,
    rules: SamplingRules,
    keys: Key[Array, "B"],
    positions: Int32[Array, "B"],
) -> SampledTokens:
    """Samples the tokens at these positions from the hidden states one position before; for `keys` see `sample_key`."""
    divisor = jnp.where(jnp.asarray(rules.temperature) == 0, 1.0, rules.temperature)
    logits = scaled_logits(hidden, head, divisor)
    return sampler(logits, rules, jax.vmap(jax.random.fold_in)(keys, positions))


def token_outcomes(
    sampled: SampledTokens, running: Bool[Array, "B"], eos_ids: Int32[Array, "ids"]
) -> tuple[Bool[Array, "B"], Bool[Array, "B"], Bool[Array, "B"]]:
    """Returns three masks of running rows: token accepted, EOS token accepted, and non-finite logits."""
    # The logprob of a token sampled from non-finite logits is not finite.
    broken = running & ~jnp.isfinite(sampled.logprobs)
    active = running & ~broken
    return active, active & jnp.any(sampled.token_ids[:, None] == eos_ids, axis=1), broken
