"""Writes small tokenizers with the chat templates and control tokens of real models."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from app.model.io.model_files import open_model
from app.prompts.tokenizer import QWEN2_SPLIT, Tokenizer, load_tokenizer

TEMPLATES = Path(__file__).with_name("templates")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES: Any = [("Ċ", "Ċ"), ("h", "e"), (">", "Ċ"), ("Ġ", "Ġ"), ("s", "x")]
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


class Family(NamedTuple):
    special: list[str]
    """Control tokens; the first ones end turns."""
    num_ends: int = 1
    plain: Sequence[str] = ()
    """Added tokens that decode as text."""
    bos: str | None = None


CHATML = Family(["<|im_end|>", "<|endoftext|>", "<|im_start|>"], 2)
THINKING = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
LLAMA3 = ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>"]
GEMMA = Family(["<end_of_turn>", "<eos>", "<bos>", "<start_of_turn>"], 2, ["\n", "\n\n"], "<bos>")
FAMILIES = {
    "qwen2_5": CHATML._replace(plain=["<tool_call>", "</tool_call>"]),
    "qwen3": CHATML._replace(plain=THINKING),
    "llama3_1": Family([*LLAMA3, "<|end_header_id|>", "<|python_tag|>"], 3, [], "<|begin_of_text|>"),
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "smollm2": CHATML,
}


def write_tokenizer(
    folder: Path, backend: Backend, config: Any, *, generation_config: Any = None, vocab_size: int = 400
) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    of_model = {"model_type": "llama", "vocab_size": vocab_size}
    contents = {"tokenizer_config": config, "generation_config": generation_config or {}, "config": of_model}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    save_file({"model.norm.weight": np.ones(2, np.float32)}, folder / "model.safetensors")
    return folder


def family_tokenizer(
    folder: Path, family: str | Family, template: str | None = None, **template_kwargs: Any
) -> Tokenizer:
    """Writes a model directory of one token per byte, a few merges and a family's control tokens and template."""
    if isinstance(family, str):
        template, family = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8"), FAMILIES[family]
    tokens = [*BYTES, *("".join(pair) for pair in MERGES)]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=MERGES))
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
    plain_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, plain_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.plain])
    ends = [backend.token_to_id(token) for token in family.special[: family.num_ends]]
    config = {
        "eos_token": family.special[0],
        "chat_template": template,
        **({"bos_token": family.bos} if family.bos else {}),
    }
    write_tokenizer(folder, backend, config, generation_config={"eos_token_id": ends})
    return load_tokenizer(open_model(str(folder)), template_kwargs)
