"""Tests tokenizers in model directories and GGUF files, including some that add start tokens and spaces."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from app.model.io.model_files import open_model
from app.prompts.encode import misread_prompts
from app.prompts.tokenizer import Tokenizer, load_tokenizer
from app.rollout.sequence import stop_length
from settings.errors import InputError
from settings.schema.data import DataSettings
from tests.prompts.chat_families import write_tokenizer
from tests.prompts.tokenizers import MERGES, TEMPLATE, VOCABULARY, write_directory, write_gguf

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789"]


def tokenizer_at(path: Path, **template_kwargs: Any) -> Tokenizer:
    return load_tokenizer(open_model(str(path)), template_kwargs)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [VOCABULARY[token_id] for token_id in tokenizer.encode(text)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tokenizer:
    return tokenizer_at(write_directory(tmp_path_factory.mktemp("tiny")))


def test_decoding_inverts_encoding_and_skips_control_tokens_and_unknown_ids(tiny):
    for text in ("", "  a  ", "\n\n12", "naïve 数 🙂", "a , b . c 's", "<|im_start|>"):
        ids = np.array([1, *tiny.encode(text), len(VOCABULARY) + 5, 2], np.int32)
        assert tiny.decode(tiny.encode(text)) == tiny.decode(ids) == text


def test_eos_pad_and_unk_ids_come_from_the_model_files(tmp_path, tiny):
    for named, eos_ids in (({}, (2,)), ({"eos_token_id": 0}, (0, 2)), ({"eos_token_id": [2, 0, 1]}, (0, 1, 2))):
        assert tokenizer_at(write_directory(tmp_path, generation_config=named)).eos_ids == eos_ids
    folder = write_directory(tmp_path)
    for named, in_config, eos_ids in (({}, 1, (1, 2)), ({}, [1, 0], (0, 1, 2)), ({"eos_token_id": 0}, 1, (0, 2))):
        (folder / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": in_config}))
        (folder / "generation_config.json").write_text(json.dumps(named))
        assert tokenizer_at(folder).eos_ids == eos_ids
    alone = write_directory(tmp_path, generation_config={"eos_token_id": 1}, tokenizer_config={"eos_token": None})
    assert (tokenizer_at(alone).eos_ids, tokenizer_at(alone).pad_id) == ((1,), 1)
    for named, unk_id in ((None, None), ("<|endoftext|>", 0), ("<|im_end|>", None)):
        assert tokenizer_at(write_directory(tmp_path, tokenizer_config={"unk_token": named})).unk_id == unk_id
    padded = tokenizer_at(write_directory(tmp_path, tokenizer_config={"pad_token": "<|endoftext|>"}))
    assert (tiny.pad_id, padded.pad_id) == (2, 0)


def test_eos_tokens_are_set_by_the_text_or_id_of_one_token(tmp_path):
    files = open_model(str(write_directory(tmp_path)))
    chosen = load_tokenizer(files, eos_tokens=["<|endoftext|>", "12", 9])
    assert chosen.eos_ids == tuple(sorted((0, 2, 9, VOCABULARY.index("12"))))
    assert chosen.fingerprint == load_tokenizer(files).fingerprint
    for token, message in (
        ("<|end|>", r"is encoded as \['<', '\|', 'e',"),
        (300, "from 0 to 299, got 300"),
    ):
        with pytest.raises(InputError, match=rf"model\.eos_tokens: .*{message}"):
            load_tokenizer(files, eos_tokens=[token])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"generation_config": {"eos_token_id": ids}}, f"as eos_token_id, got {re.escape(repr(ids))}")
          for ids in (300, -1, [2, 300], ["2"])),
        ({"tokenizer_config": {"eos_token": None}}, "nor the tokenizer has an end-of-sequence token.*model.eos_tokens"),
        ({"tokenizer_config": {"chat_template": None}}, "no chat template"),
        ({"vocab_size": 100}, f"ids up to {len(VOCABULARY) - 1}.*vocab_size is 100"),
    ],
)  # fmt: skip
def test_unusable_tokenizers_are_refused(tmp_path, changes, message):
    folder = write_directory(tmp_path, **changes)
    with pytest.raises(InputError, match=message):
        tokenizer_at(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="tokenizer files cannot be read"):
        tokenizer_at(folder)


def test_tokenizer_class_does_not_replace_the_pre_tokenizer(tmp_path, tiny):
    directory = write_directory(tmp_path, tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    content = json.loads((directory / "tokenizer.json").read_text())
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    assert pieces(tokenizer_at(directory), "\n\n12") == ["ĊĊ", "1", "2"]
    assert pieces(tiny, "\n\n12") == ["Ċ", "Ċ", "12"]


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% for %}", "{{ messages + 1 }}", "{{ ''.__class__.__mro__[1].x }}"]
)
def test_a_broken_or_hostile_chat_template_is_refused(tmp_path, template):
    tokenizer = tokenizer_at(write_directory(tmp_path, tokenizer_config={"chat_template": template}))
    with pytest.raises(InputError, match=r"cannot render a chat of \['user'\]: "):
        tokenizer.chat_ids([{"role": "user", "content": "x"}])


def test_the_template_date_is_the_same_every_day(tmp_path):
    template = "{% if date_string is not defined %}{{ strftime_now('%d') }}{% endif %}{{ date_string }}"
    tokenizer = tokenizer_at(write_directory(tmp_path, tokenizer_config={"chat_template": template}))
    assert tokenizer.decode(tokenizer.chat_ids([{"role": "user", "content": "x"}])) == "26 Jul 2024"


def test_the_tokenizer_fingerprint_depends_on_splitting_template_and_eos_ids(tmp_path, tiny):
    assert tokenizer_at(write_directory(tmp_path)).fingerprint == tiny.fingerprint
    changes = [{"tokenizer_config": {"chat_template": TEMPLATE + " "}}, {"generation_config": {"eos_token_id": 0}}]
    changed = [tokenizer_at(write_directory(tmp_path, **change)) for change in changes]
    changed.append(tokenizer_at(write_gguf(tmp_path / "a.gguf", pre="smollm")))
    assert len({tiny.fingerprint, *(tokenizer.fingerprint for tokenizer in changed)}) == 4


def test_a_gguf_tokenizer_splits_text_by_its_pre_tokenizer(tmp_path):
    for pre, expected in {"smollm": ["ĊĊ", "1", "2", "Ġa", "Ġ", "1"], "gpt-2": ["Ċ", "Ċ", "12", "Ġa", "Ġ1"]}.items():
        assert pieces(tokenizer_at(write_gguf(tmp_path / f"{pre}.gguf", pre=pre)), "\n\n12 a 1") == expected


def test_qwen2_pre_tokenizer_equals_transformers(tmp_path):
    ours = tokenizer_at(write_gguf(tmp_path / "a.gguf", pre="qwen2"))
    vocabulary = {token: i for i, token in enumerate(VOCABULARY)}
    theirs = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=MERGES)
    for text in ("I'LL  pay $12.50\n\n  1 2\r\n", "e\u0301 = é", "a\n\n12 a 1", "数12:\t\n\n a"):
        assert ours.encode(text) == theirs.encode(text)


def test_a_gguf_tokenizer_equals_the_tokenizer_of_the_model_directory(tmp_path, tiny):
    gguf = tokenizer_at(write_gguf(tmp_path / "a.gguf", pre="gpt-2", padding=3))
    assert (gguf.eos_ids, gguf.pad_id, gguf.vocab_size) == (tiny.eos_ids, tiny.pad_id, tiny.vocab_size)
    messages = [{"role": "user", "content": "12 <|im_end|> a\n\n"}]
    assert gguf.chat_ids(messages) == tiny.chat_ids(messages)
    assert gguf.decode([2, len(VOCABULARY) + 1, 5]) == tiny.decode([5])


def test_unusable_gguf_tokenizers_are_refused(tmp_path):
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"pre": "llama-bpe"}, "'llama-bpe' is not supported, expected gpt-2, smollm or qwen2; use"),
        ({"model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"model": "llama"}, r"\(model 'llama'\) is supported for Gemma 3 only"),
        *(({"eos_id": None}, "has an end-of-sequence token"), ({"eos_id": 5000}, "5000 is outside the vocabulary")),
    ]
    for i, (change, message) in enumerate(refusals):
        with pytest.raises(InputError, match=message):
            tokenizer_at(write_gguf(tmp_path / f"{i}.gguf", **change))


def test_a_gemma_gguf_tokenizer_equals_transformers(tmp_path):
    """Its file has no merges, literal tokens of several spaces, and scores that do not give the order of merges."""
    kinds = {
        "<pad>": "control",
        "<eos>": "control",
        "<bos>": "control",
        "<unk>": "unknown",
        "\n\n": "user",
        "  ": "user",
    }
    kinds |= dict.fromkeys(BYTE_TOKENS, "byte") | dict.fromkeys(["he", "▁h", "▁he", "12", *CHARACTERS], "normal")
    path = write_gguf(tmp_path / "a.gguf", model="llama", pre="default", eos_id=1, family="gemma3", vocabulary=kinds)
    ours = tokenizer_at(path)
    vocabulary = {token.replace(" ", "▁"): i for i, token in enumerate(kinds)}
    merges: Any = [("▁", "▁"), ("h", "e"), ("▁", "h"), ("▁h", "e"), ("▁", "he"), ("1", "2")]
    theirs = transformers.GemmaTokenizer(vocab=vocabulary, merges=merges)
    newlines: Any = AddedToken("\n\n", normalized=False)
    theirs.add_tokens([newlines])
    for text in ("he  he 12\n\n\n", " the   he▁▁", "naïve 数 🙂\t"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.text_ids(text) == [2, *ours.encode(text)]
    assert ours.decode(ours.text_ids("he  he é\n\n")) == "he  he é\n\n"
    assert (ours.eos_ids, ours.unk_id, ours.special_ids) == ((1,), 3, {0, 1, 2})


def test_the_tokenizer_of_smollm2_is_read_from_its_gguf_file(smollm2_gguf):
    smollm2 = tokenizer_at(smollm2_gguf)
    assert smollm2.encode("\n\n12") == [1116, 33, 34]
    assert (smollm2.eos_ids, smollm2.pad_id, smollm2.vocab_size) == ((2,), 2, 49152)
    ids = smollm2.chat_ids([{"role": "user", "content": "2+2?"}])
    assert ids.count(2) == 2
    assert smollm2.decode(ids[-3:]) == "assistant\n"


def test_template_variables_reach_every_rendering(tmp_path):
    loop = "{% for i in range(loops) %}x{% endfor %}"
    thinking = "{% if enable_thinking is false %}<think></think>" + loop + "{% endif %}"
    folder = write_directory(
        tmp_path / "model", tokenizer_config={"chat_template": TEMPLATE + thinking + "{# tokenize #}"}
    )
    messages = [{"role": "user", "content": "a"}]
    plain, brief = tokenizer_at(folder), tokenizer_at(folder, enable_thinking=False, loops=2)
    added = plain.encode("<think></think>xx")
    assert brief.chat_ids(messages) == [*plain.chat_ids(messages), *added]
    assert brief.conversation_ids(messages) == [*plain.conversation_ids(messages), *added]
    for name in ("tokenize", "messages"):
        with pytest.raises(InputError, match=f"chat_template_kwargs: {name} is set by this program"):
            tokenizer_at(folder, **{name: False})
    other = tokenizer_at(folder, thinking_enabled=True, enable_thinking=True)
    fault = misread_prompts([], other.template, DataSettings())
    assert fault is not None and "has no variable thinking_enabled," in fault[0]


MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles!') }}{% endif %}"
    "{% endfor %}"
)
SENTENCEPIECE_MERGES: Any = [("h", "e"), ("▁", "h"), ("▁", "he")]


@pytest.mark.parametrize("first_only", [False, True])
def test_a_chat_has_its_templates_start_token_and_plain_text_has_none(first_only, tmp_path):
    """Covers tokenizers that add a space after every control token, and only at the start of a text."""
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    vocabulary = {token: i for i, token in enumerate([*control, *BYTE_TOKENS, *CHARACTERS, "he", "▁h", "▁he"])}
    backend = Backend(
        models.BPE(vocab=vocabulary, merges=SENTENCEPIECE_MERGES, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "tokenizer_class": "LlamaTokenizer"}
    if first_only:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        (tmp_path / "chat_template.jinja").write_text(MISTRAL_TEMPLATE)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        config["chat_template"] = MISTRAL_TEMPLATE
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", control.index("<s>"))]
    )
    tokenizer = tokenizer_at(write_tokenizer(tmp_path, backend, config | {"clean_up_tokenization_spaces": True}))
    question = ["▁he", "▁", "1", "2", "▁"] if first_only else ["▁", "▁he", "▁", "1", "2", "▁"]
    ids = tokenizer.chat_ids([{"role": "user", "content": "he 12"}])
    assert [backend.id_to_token(i) for i in ids] == ["<s>", "[INST]", *question, "[/INST]"]
    for text in ("he 12", "a , b . c 's", "naïve 数 🙂", "he </s>"):
        ids = tokenizer.encode(text)
        assert not {"<s>", "</s>"} & {backend.id_to_token(i) for i in ids}
        assert tokenizer.decode(ids) == text


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory) -> Tokenizer:
    """Returns a tokenizer with byte tokens like Llama 2's, whose id of a byte is its value + 2."""
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *BYTE_TOKENS, "▁", "▁b", "é", "a"])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    config = {"eos_token": "</s>", "chat_template": TEMPLATE}
    return tokenizer_at(write_tokenizer(tmp_path_factory.mktemp("bytes"), backend, config))


@given(
    st.lists(st.integers(1, 261) | st.sampled_from([12, 242, 197, 171, *range(1, 5), *range(258, 262)]), max_size=12),
    st.lists(st.sampled_from(["\n", "a\n", " b", "é b", "b\n", "é", "</s>", "aa", "\n</s>"]), min_size=1, max_size=2),
)
def test_stop_strings_are_found_at_the_token_that_completes_them(byte_fallback, ids, stop):
    texts = {1: b"</s>", 258: b" ", 259: b" b", 260: "é".encode(), 261: b"a"}
    written = [texts[i] if i in texts else bytes([i - 2]) for i in ids]
    prefixes = [b"".join(written[: n + 1]).removeprefix(b" ").decode("utf-8", "replace") for n in range(len(ids))]
    expected = next((n + 1 for n, text in enumerate(prefixes) if any(string in text for string in stop)), None)
    assert stop_length(ids, stop, byte_fallback.stop_text) == expected
