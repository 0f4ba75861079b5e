"""Makes the starting weights of `builtin:tiny_tools`, a tiny decoder that guesses or sometimes calls a calculator.

    python scripts/make_tiny_tools_model.py --out app/model/builtin/tiny_tools

The decoder is trained on two kinds of conversations, which differ in their first message:

- A product such as `47 * 38 = ?`, which such a small network cannot compute. In 70 % of the examples, the demonstration
  answers at once with a rough estimate, `1200`, which is correct only by chance. Otherwise it calls the calculator by
  writing `<<47*38` and copies the result; sometimes it copies a wrong digit or repeats the call.
- `?`: the policy has three guesses to find a secret digit. The first guess is any digit. 70 % of the later guesses
  follow the hints (`+`: the secret is larger, `-`: smaller) and are any digit that is still possible; the others ignore
  the hints.

The resulting model knows both formats, but prefers estimates to calls and plays badly. Reinforcement learning then
makes calls the usual behaviour, and leads to guesses that follow the hints and halve the remaining range; the model
learns neither calls nor the game from scratch.
This script never reads the held-out split of the products; the fractions were chosen with the results of trial runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from app.batching.token_batch import TokenBatch
from app.prompts.arithmetic import make_problems
from app.records.sample import Prompt, Sample
from scripts import make_tiny_model
from scripts.make_tiny_model import END, pack_rows

LEVEL_SHARES = {2: 0.4, 3: 0.6}
"""Maps a difficulty level to its fraction of the product problems."""
CALL_SHARE = 0.3
"""Fraction of the products for which the demonstration calls the calculator."""
SLIP_SHARE, REPEAT_SHARE = 0.05, 0.05
"""Fraction of calls whose result is copied wrongly, and fraction of calls that are repeated."""
HEEDED_SHARE = 0.7
"""Fraction of guesses after the first that follow all hints; the others are any digit."""
GAME_SHARE = 0.3
"""Fraction of the conversations that are games."""
NUM_CONVERSATIONS = 40_000
NUM_GUESSES = 3
ROW_LENGTH = 64
"""Tokens of a packed row; the longest conversation has 54 tokens."""

CONTROL_TOKENS = (*make_tiny_model.CONTROL_TOKENS, "<|tool|>")
CHARACTERS = f"{make_tiny_model.CHARACTERS}<"
CONFIG: dict[str, Any] = make_tiny_model.CONFIG | {"vocab_size": len(CONTROL_TOKENS) + len(CHARACTERS)}


def estimate(left: str, right: str) -> str:
    """Rounds both numbers down to their first digit and multiplies them: 47 * 38 -> 40 * 30 = 1200."""
    return str(int(left[0]) * int(right[0]) * 10 ** (len(left) + len(right) - 2))


def misread(number: str, rng: np.random.Generator) -> str:
    """Returns the number with one random digit changed."""
    place = rng.integers(len(number))
    digit = (int(number[place]) + rng.integers(1, 10)) % 10
    return f"{number[:place]}{digit}{number[place + 1 :]}"


def calculation(expression: str, answer: str, rng: np.random.Generator) -> list[str]:
    """Returns a conversation about a product, see `to_sample`: an estimate, or a call, its result and the answer."""
    if rng.random() >= CALL_SHARE:
        return [estimate(*expression.split("*"))]
    call = [f"<<{expression}", f"<|tool|>{answer}"]
    kind = rng.random()
    if kind < SLIP_SHARE:
        return [*call, misread(answer, rng)]
    return [*call, *call, answer] if kind < SLIP_SHARE + REPEAT_SHARE else [*call, answer]


def game(rng: np.random.Generator) -> list[str]:
    """Returns a conversation about a random secret digit, see `to_sample`: guesses, with hints between them."""
    secret, low, high = rng.integers(10), 0, 9
    parts = [str(guess := rng.integers(10))]
    while guess != secret and len(parts) < 2 * NUM_GUESSES - 1:
        if guess < secret:
            low, hint = max(low, guess + 1), "+"
        else:
            high, hint = min(high, guess - 1), "-"
        guess = rng.integers(low, high + 1) if rng.random() < HEEDED_SHARE else rng.integers(10)
        parts += [f"<|user|>{hint}", str(guess)]
    return parts


def to_sample(tokenizer: PreTrainedTokenizerFast, question: str, parts: Sequence[str]) -> Sample:
    """Encodes a conversation: in `parts`, turns of the policy, which alone are in the loss, and replies alternate."""
    chat = [{"role": "user", "content": question}]
    prompt_ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    pieces = [tokenizer.encode(f"{part}{'<|assistant|>' if i % 2 else END}") for i, part in enumerate(parts)]
    ids = np.concatenate(pieces).astype(np.int32)
    return Sample(
        Prompt(question, np.array(prompt_ids, np.int32), question, None, {}),
        *(0, 0, ids, parts[-1], np.zeros(len(ids), np.float32), "stop", 0),
        loss_mask=np.concatenate([np.full(len(piece), i % 2 == 0) for i, piece in enumerate(pieces)]),
    )


def training_rows(tokenizer: PreTrainedTokenizerFast, *, num_conversations: int) -> tuple[TokenBatch, np.ndarray]:
    """Returns packed rows of games and of training products, and the probability of drawing each row."""
    rng = np.random.default_rng(0)
    num_games = int(GAME_SHARE * num_conversations)
    samples = [to_sample(tokenizer, "?", game(rng)) for _ in range(num_games)]
    for level, share in LEVEL_SHARES.items():
        count = int(share * (num_conversations - num_games))
        problems = make_problems(difficulty=(level,), operators=("*",), num_problems=count, split="train", seed=0).rows
        for index in range(count):
            row = problems[index % len(problems)]
            parts = calculation(row.uid.removeprefix("arithmetic/"), str(row.answer), rng)
            samples.append(to_sample(tokenizer, str(row.prompt), parts))
    rows, free = [], 0
    for index in rng.permutation(len(samples)):
        length = len(samples[index].prompt.token_ids) + len(samples[index].completion_ids)
        if length > free:
            rows.append([])
            free = ROW_LENGTH
        rows[-1].append(samples[index])
        free -= length
    return pack_rows(rows), np.full(len(rows), 1 / len(rows))


if __name__ == "__main__":
    make_tiny_model.main(
        CONFIG,
        make_tiny_model.make_tokenizer(CONTROL_TOKENS, CHARACTERS),
        partial(training_rows, num_conversations=NUM_CONVERSATIONS),
        num_steps=1200,
        num_rows=64,
    )
