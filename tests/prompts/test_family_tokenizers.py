"""Tests of small tokenizers like those of Mistral, which write a start token and add spaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from app.model.io.model_files import open_model
from app.prompts.dataset import DatasetRow
from app.prompts.encode import encode_prompts
from app.prompts.tokenizer import Tokenizer, load_tokenizer
from settings.errors import InputError
from settings.schema.data import DataSettings

MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles!') }}{% endif %}"
    "{% endfor %}"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789"]
SENTENCEPIECE_MERGES: Any = [("h", "e"), ("▁", "h"), ("▁", "he")]


class Kind(NamedTuple):
    backend: Backend
    bos: str
    eos: str
    template: str
    chat: list[str]
    """Returns the tokens of the chat "he 12" up to the start of the answer."""


def added(backend: Backend, control: list[str], *, bos: str) -> Backend:
    """Adds control tokens, and a post-processor that puts `bos` before plain text."""
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, backend.token_to_id(bos))]
    )
    return backend


def sentencepiece(control: list[str]) -> Backend:
    vocabulary = {token: i for i, token in enumerate([*control, *BYTES, *CHARACTERS, "he", "▁h", "▁he"])}
    return Backend(
        models.BPE(vocab=vocabulary, merges=SENTENCEPIECE_MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )


def mistral(*, first_only: bool) -> Kind:
    """Two kinds: a space is added after every control token, or only at the start of a text."""
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    backend = sentencepiece(control)
    if first_only:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    question = ["▁he", "▁", "1", "2", "▁"] if first_only else ["▁", "▁he", "▁", "1", "2", "▁"]
    chat = ["<s>", "[INST]", *question, "[/INST]"]
    return Kind(added(backend, control, bos="<s>"), "<s>", "</s>", MISTRAL_TEMPLATE, chat)


KINDS = {
    "mistral": mistral(first_only=False),
    "mistral-v3": mistral(first_only=True),
}
EVERY_KIND = pytest.mark.parametrize("name", KINDS)


def tokenizer_of(name: str, folder: Path, *, template_file: bool = False) -> Tokenizer:
    """Returns the tokenizer of a model directory of this kind."""
    kind = KINDS[name]
    kind.backend.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": kind.bos,
        "eos_token": kind.eos,
        "add_bos_token": True,
        "tokenizer_class": "LlamaTokenizer",
        "clean_up_tokenization_spaces": True,
    }
    if template_file:
        (folder / "chat_template.jinja").write_text(kind.template)
    else:
        config["chat_template"] = kind.template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 400}))
    save_file({"model.norm.weight": np.ones(2, np.float32)}, folder / "model.safetensors")
    return load_tokenizer(open_model(str(folder)))


def tokens_of(name: str, ids: list[int]) -> list[str]:
    return [str(KINDS[name].backend.id_to_token(token_id)) for token_id in ids]


@EVERY_KIND
@pytest.mark.parametrize("template_file", [False, True])
def test_a_chat_has_the_start_token_that_its_template_writes_and_no_second_one(name, template_file, tmp_path):
    tokenizer = tokenizer_of(name, tmp_path, template_file=template_file)
    ids = tokenizer.chat_ids([{"role": "user", "content": "he 12"}])
    assert tokens_of(name, ids) == KINDS[name].chat
    assert tokens_of(name, ids).count(KINDS[name].bos) == 1


@EVERY_KIND
def test_plain_text_gets_no_start_token_and_comes_back(name, tmp_path):
    tokenizer = tokenizer_of(name, tmp_path)
    for text in ("he 12", "a , b . c 's", "naïve 数 🙂", f"he {KINDS[name].eos}"):
        ids = tokenizer.encode(text)
        assert not {KINDS[name].bos, KINDS[name].eos} & set(tokens_of(name, ids))
        assert tokenizer.decode(ids) == text


def test_a_template_without_a_system_role_names_the_setting(tmp_path):
    tokenizer = tokenizer_of("mistral", tmp_path)
    rows = [DatasetRow(uid="row-0", prompt="he 12", answer=None, extra={})]
    data = DataSettings(max_prompt_length=50, overlong_prompts="error")
    assert len(encode_prompts(rows, tokenizer.chat_ids, data)[0]) == 1
    with pytest.raises(InputError, match=r"\['system', 'user'\].*Only user.*data\.system_prompt: null"):
        encode_prompts(rows, tokenizer.chat_ids, data.model_copy(update={"system_prompt": "be brief"}))
