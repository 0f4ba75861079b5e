"""Tests that `builtin:tiny_tools` knows how to call the calculator and how to guess, but seldom does and poorly."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from app.batching.forward_passes import row_logprobs
from app.mesh import device_mesh
from app.model.decoder import DecoderDefinition
from app.model.io.families import architecture_from_config
from app.model.io.hf_weights import load_weights
from app.model.io.model_files import open_model
from app.prompts.arithmetic import make_problems
from app.prompts.tokenizer import load_tokenizer
from app.records.sample import Sample
from scripts import make_tiny_model, make_tiny_tools_model
from scripts.make_tiny_tools_model import CHARACTERS, CONFIG, CONTROL_TOKENS, HEEDED_SHARE, to_sample
from settings import load

TOKENIZER = make_tiny_model.make_tokenizer(CONTROL_TOKENS, CHARACTERS)


@pytest.fixture(scope="module")
def held_out() -> list[tuple[str, str, str]]:
    """Returns expressions, right products and questions of the held-out split."""
    problems = make_problems(difficulty=(2, 3), operators=("*",), num_problems=64, split="test", seed=0)
    return [(row.uid.removeprefix("arithmetic/"), str(row.answer), str(row.prompt)) for row in problems.rows]


def probabilities(samples: Sequence[Sample]) -> list[np.ndarray]:
    """Returns the probability that the packaged model gives to each token of each completion."""
    files = open_model("builtin:tiny_tools")
    definition = DecoderDefinition.create(architecture_from_config(files.config))
    params = load_weights(definition, files.weights, device_mesh.make_mesh(load(None, [], {}).settings.mesh))
    rows = make_tiny_model.pack_rows([(sample,) for sample in samples])
    how = {"temperature": 1.0, "dtype": jnp.dtype(jnp.float32), "remat": "none", "logits_chunk": rows.targets.size}
    logprobs = np.asarray(row_logprobs(definition.bind(params), rows, **how)[0])
    return [np.exp(one[: len(sample.completion_ids)]) for one, sample in zip(logprobs, samples, strict=True)]


def test_the_packaged_files_are_small_and_what_the_script_writes(tmp_path: Path) -> None:
    packaged = open_model("builtin:tiny_tools").path
    assert sum(path.stat().st_size for path in packaged.iterdir()) < 1_000_000
    make_tiny_model.write_tokenizer_and_config(tmp_path, CONFIG, TOKENIZER)
    for path in tmp_path.iterdir():
        assert json.loads(path.read_text()) == json.loads((packaged / path.name).read_text())


def test_a_conversation_is_the_chat_template_and_the_end_tokens_of_the_policy() -> None:
    tokenizer = load_tokenizer(open_model("builtin:tiny_tools"))
    sample = to_sample(TOKENIZER, "47 * 38 = ?", ["<<47*38", "<|tool|>1786", "1786"])
    ids = np.concatenate([sample.prompt.token_ids, sample.completion_ids])
    text = "<|user|>47*38=?<|assistant|><<47*38<|end|><|tool|>1786<|assistant|>1786<|end|>"
    assert tokenizer.decode_with_special_tokens(ids) == text
    written = sample.completion_ids[sample.mask]
    assert tokenizer.decode_with_special_tokens(written) == "<<47*38<|end|>1786<|end|>"
    end = written[-1]
    assert end in tokenizer.eos_ids
    contents = {"user": "47 * 38 = ?", "assistant": "<<47*38", "tool": "1786"}
    chat = [{"role": role, "content": contents[role]} for role in contents]
    turns = ids[ids != end].tolist()
    assert tokenizer.chat_ids(chat) + tokenizer.encode("1786") == turns


def test_conversations_of_products_are_of_the_training_split_only() -> None:
    rows, _ = make_tiny_tools_model.training_rows(TOKENIZER, num_conversations=300)
    texts = "".join(str(TOKENIZER.decode(ids)) for ids in np.asarray(rows.token_ids))
    products = re.findall(r"<\|user\|>(\d+\*\d+)=\?", texts)
    held_out = make_problems(difficulty=(2, 3), operators=("*",), num_problems=10**6, split="test", seed=0)
    assert len(products) == 210
    assert not set(products) & {row.uid.removeprefix("arithmetic/") for row in held_out.rows}
    assert texts.count("<|user|>?") == 90


def test_the_model_calls_three_times_in_ten_and_then_copies(held_out: list[tuple[str, str, str]]) -> None:
    calls = [to_sample(TOKENIZER, q, [f"<<{product}", f"<|tool|>{answer}", answer]) for product, answer, q in held_out]
    given = probabilities(calls)
    assert 0.2 <= np.mean([one[0] for one in given]) <= 0.4
    # From the second token on, as it is a call by then.
    assert np.mean([np.prod(one[1:][sample.mask[1:]]) for one, sample in zip(given, calls, strict=True)]) >= 0.75


def test_most_likely_the_model_only_estimates(held_out: list[tuple[str, str, str]]) -> None:
    estimates = [make_tiny_tools_model.estimate(*product.split("*")) for product, _, _ in held_out]
    at_once = [
        to_sample(TOKENIZER, question, [text]) for text, (_, _, question) in zip(estimates, held_out, strict=True)
    ]
    assert np.mean([np.prod(one) for one in probabilities(at_once)]) >= 0.5
    assert np.mean([text == answer for text, (_, answer, _) in zip(estimates, held_out, strict=True)]) <= 0.1


def test_the_model_heeds_hints_more_often_than_chance() -> None:
    opened = [to_sample(TOKENIZER, "?", [str(digit)]) for digit in range(10)]
    hinted = [to_sample(TOKENIZER, "?", ["5", "<|user|>+", str(digit)]) for digit in range(10)]
    first = np.array([one[0] for one in probabilities(opened)])
    second = np.array([one[-2] for one in probabilities(hinted)])
    assert np.all(first >= 0.05)
    assert np.sum(first) == pytest.approx(1, abs=0.02)
    # Of those that ignore the hint, four in ten agree with it by chance.
    assert np.sum(second[6:]) == pytest.approx(HEEDED_SHARE + (1 - HEEDED_SHARE) * 0.4, abs=0.1)
