"""The tokenizer's files of a model that is written out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from app.model.io.gguf import GgufFile
from app.model.io.model_files import ModelFiles
from app.prompts.tokenizer import TOKENIZER_FILE, load_fast_tokenizer

CONFIG_FILE = "tokenizer_config.json"
PORTABLE_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""What transformers 4 and 5 both know; 5 writes a name of its own."""

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
"""No code among them."""


def write_tokenizer(files: ModelFiles, directory: Path) -> None:
    """The files of a model's directory as they stand; those that say the same of a GGUF file's tokenizer."""
    if isinstance(files.weights, GgufFile):
        load_fast_tokenizer(files).save_pretrained(directory)
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        config["tokenizer_class"] = PORTABLE_TOKENIZER_CLASS
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return
    for name in TOKENIZER_FILES:
        # A hub's files are links into its cache.
        if (files.path / name).is_file():
            shutil.copyfile(files.path / name, directory / name)
