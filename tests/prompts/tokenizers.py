"""Writes tokenizers with a token for each byte, as directories and GGUF files."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.model.io.gguf_files import finish
from tests.prompts.chat_families import write_tokenizer

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = [*CONTROL_TOKENS, *BYTES, "ĊĊ", "Ġ1", "12", "Ġa"]
MERGES: Any = [("Ċ", "Ċ"), ("Ġ", "1"), ("1", "2"), ("Ġ", "a")]  # transformers declares list[str], but takes pairs
GGUF_TYPES = {"normal": 1, "unknown": 2, "control": 3, "user": 4, "unused": 5, "byte": 6}


def write_directory(directory: Path, *, tokenizer_config=None, generation_config=None, vocab_size=300) -> Path:
    """Writes a model directory whose tokenizer has one token per byte and four merges."""
    directory.mkdir(exist_ok=True)
    vocabulary = {token: i for i, token in enumerate(VOCABULARY)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    chosen = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE} | (tokenizer_config or {})
    config = {key: value for key, value in chosen.items() if value is not None}
    return write_tokenizer(directory, backend, config, generation_config=generation_config, vocab_size=vocab_size)


def write_gguf(
    path: Path, *, pre="smollm", model="gpt2", eos_id=2, template=TEMPLATE, padding=0, family="llama", vocabulary=None
) -> Path:
    """Writes a tokenizer with its merges, or without them if it is given a vocabulary of token types."""
    types = vocabulary or {token: "control" if token in CONTROL_TOKENS else "normal" for token in VOCABULARY}
    types |= {f"[PAD{i}]": "unused" for i in range(padding)}
    writer = GGUFWriter(path, family)
    for field, value in {"embedding": 4, "feed_forward": 4, "context": 64}.items():
        getattr(writer, f"add_{field}_length")(value)
    writer.add_head_count(1)
    writer.add_block_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_sliding_window(4 if family == "gemma3" else 0)
    writer.add_add_space_prefix(False)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*types])
    writer.add_token_types([GGUF_TYPES[kind] for kind in types.values()])
    if vocabulary is None:
        writer.add_token_merges([" ".join(pair) for pair in MERGES])
    else:
        writer.add_bos_token_id(2)
        writer.add_unk_token_id(3)
    if eos_id is not None:
        writer.add_eos_token_id(eos_id)
    if template is not None:
        writer.add_chat_template(template)
    writer.add_tensor("token_embd.weight", np.ones((len(types), 4), np.float32))
    finish(writer)
    return path
