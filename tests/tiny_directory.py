"""Writes a Hugging Face directory of a tiny model: random weights, one token per character."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from app.model.decoder import DecoderDefinition
from app.model.io.families import architecture_from_config
from app.model.io.hf_weights import expected_tensors

END, UNKNOWN = "<|end|>", "<|unknown|>"
CONTROL_TOKENS = (END, UNKNOWN, "<|user|>", "<|assistant|>")
CHARACTERS = "0123456789+-*=?#.,"
TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message.content | replace(' ', '') }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns every tensor of the architecture with Hugging Face's names and layout."""
    rng = np.random.default_rng(seed)
    definition = DecoderDefinition.create(architecture_from_config(config))
    return {
        entry.name: rng.normal(float("norm" in entry.name), 0.2, entry.file_shape).astype(np.float32)
        for entry in expected_tensors(definition)
    }


def write_tokenizer(directory: Path, *, eos_token: str | None = END, chat_template: str | None = TEMPLATE) -> None:
    vocabulary = {token: i for i, token in enumerate((*CONTROL_TOKENS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos_token, unk_token=UNKNOWN, chat_template=chat_template
    ).save_pretrained(directory)


def write_model(directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (directory / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config, seed), directory / "model.safetensors")
    write_tokenizer(directory)
    return directory


def write_reward_model(directory: Path, *, seed: int = 7, num_labels: int = 1, **changes: Any) -> Path:
    changes = {"architectures": ["LlamaForSequenceClassification"]} | changes
    write_model(directory, seed=seed)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    tensors = random_tensors(CONFIG, seed)
    del tensors["lm_head.weight"]
    head = np.random.default_rng(seed).normal(0, 0.2, (num_labels, CONFIG["hidden_size"]))
    save_file({**tensors, "score.weight": head.astype(np.float32)}, directory / "model.safetensors")
    return directory
