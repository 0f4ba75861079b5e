"""The tokenizer files of an exported model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from app.model.io.gguf import GgufFile
from app.model.io.model_files import ModelFiles
from app.prompts.tokenizer import TOKENIZER_FILE, load_fast_tokenizer

CONFIG_FILE = "tokenizer_config.json"
PORTABLE_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""A class known to both transformers 4 and 5; by default, version 5 writes a name unknown to version 4."""

TOKENIZER_FILES = (
    TOKENIZER_FILE,
    CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Files to copy; none of them contains code."""


def write_tokenizer(files: ModelFiles, directory: Path) -> None:
    """Copies the tokenizer files of a model's directory, or writes equivalent ones for a GGUF file."""
    if isinstance(files.weights, GgufFile):
        load_fast_tokenizer(files).save_pretrained(directory)
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        config["tokenizer_class"] = PORTABLE_TOKENIZER_CLASS
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return
    for name in TOKENIZER_FILES:
        # Copies the content: files from the hub are links into its cache.
        if (files.path / name).is_file():
            shutil.copyfile(files.path / name, directory / name)
