"""Makes the starting weights of `builtin:tiny_tools`: a tiny decoder that sometimes asks a calculator, and guesses.

    python scripts/make_tiny_tools_model.py --out app/model/builtin/tiny_tools

Supervised training on two kinds of conversations, which the first message tells apart:

- A product, such as `47 * 38 = ?`, which so small a network cannot work out. Seven times in ten the demonstration
  answers at once with a rough estimate, `1200`, which is right only by chance. Otherwise it calls the calculator by
  writing `<<47*38`, and copies what that says; now and then it copies wrongly or calls once more.
- `?`: a secret digit is to be found in three guesses. The first guess is any digit. Hints (`+`: the secret is larger,
  `-`: smaller) are heeded seven times in ten, by any of the digits still possible, and otherwise ignored.

What comes out knows both formats, likes estimates better than calls, and plays badly. Reinforcement learning then shows
a rare useful habit, the call, becoming the usual one, and guesses that heed their hints and halve what is left; it does
not show a call or a game learned from nothing.
This script never reads the held-out split of the products; the shares were chosen with results of trial runs in view.
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
"""Maps a difficulty level to its fraction of the products."""
CALL_SHARE = 0.3
"""Fraction of the products for which the demonstration calls the calculator."""
SLIP_SHARE, REPEAT_SHARE = 0.05, 0.05
"""Fractions of the calls whose result is copied wrongly, and of those that are made once more."""
HEEDED_SHARE = 0.7
"""Fraction of the later guesses that heed all hints; the others are any digit."""
GAME_SHARE = 0.3
"""Fraction of the conversations that are games."""
NUM_CONVERSATIONS = 40_000
NUM_GUESSES = 3
ROW_LENGTH = 64
"""In tokens; the longest conversation has 54."""

CONTROL_TOKENS = (*make_tiny_model.CONTROL_TOKENS, "<|tool|>")
CHARACTERS = f"{make_tiny_model.CHARACTERS}<"
CONFIG: dict[str, Any] = make_tiny_model.CONFIG | {"vocab_size": len(CONTROL_TOKENS) + len(CHARACTERS)}


def estimate(left: str, right: str) -> str:
    """Returns the product of two numbers of which only the first digits count: 47 * 38 -> 1200."""
    return str(int(left[0]) * int(right[0]) * 10 ** (len(left) + len(right) - 2))


def misread(number: str, rng: np.random.Generator) -> str:
    """Returns the number with one wrong digit."""
    place = rng.integers(len(number))
    digit = (int(number[place]) + rng.integers(1, 10)) % 10
    return f"{number[:place]}{digit}{number[place + 1 :]}"


def calculation(expression: str, answer: str, rng: np.random.Generator) -> list[str]:
    """Returns turns of the policy and, between them, messages: an estimate, or a call and its result copied."""
    if rng.random() >= CALL_SHARE:
        return [estimate(*expression.split("*"))]
    call = [f"<<{expression}", f"<|tool|>{answer}"]
    kind = rng.random()
    if kind < SLIP_SHARE:
        return [*call, misread(answer, rng)]
    return [*call, *call, answer] if kind < SLIP_SHARE + REPEAT_SHARE else [*call, answer]


def game(rng: np.random.Generator) -> list[str]:
    """Returns guesses of a random secret digit and, between them, hints."""
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
    """Returns a conversation of which only the policy's turns, at even places of `parts`, are trained on."""
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
    """Returns rows of games and of conversations about products of the training split, and each row's probability."""
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
