"""The tokenizer of a model, with its chat template."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from app.model.io.gguf import WORKAROUND, GgufFile
from app.model.io.model_files import ModelFiles
from app.prompts.chat_template import NO_KWARGS, ChatTemplate, pattern_of
from app.records.sample import Messages
from settings.errors import InputError, join_words

TOKENIZER_FILE = "tokenizer.json"

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)

INVALID_BYTE = re.compile("[\udc80-\udcff]")
"""Matches the code that `surrogateescape` uses for a byte that is not UTF-8."""
# GGUF `tokenizer.ggml.token_type`
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


class Tokenizer:
    """A fast tokenizer from transformers, with its chat template.

    Args:
        template_kwargs: variables for every rendering of the template.
        eos_tokens: texts and ids of additional tokens that end a completion.

    Raises:
        InputError: there is no EOS token, or an entry of `eos_tokens` is not a single token.
    """

    def __init__(
        self,
        hf_tokenizer: PreTrainedTokenizerFast,
        files: ModelFiles,
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
        eos_tokens: Sequence[str | int] = (),
    ) -> None:
        self.template = ChatTemplate(hf_tokenizer, template_kwargs)
        self.tools: Sequence[Mapping[str, Any]] = ()
        """Schemas of the functions that prompts list, as OpenAI defines them."""
        hf_tokenizer.model_max_length = 2**31  # The settings limit prompts; transformers would only warn.
        self._hf_tokenizer = hf_tokenizer
        vocabulary = hf_tokenizer.get_vocab()
        self.vocab_size: int = max(vocabulary.values()) + 1
        """Largest token id plus 1; the model's embedding may have more rows."""
        own_ends = _eos_ids(files, hf_tokenizer)
        chosen_ends = [_chosen_eos_id(files, hf_tokenizer, token) for token in eos_tokens]
        self.eos_ids: tuple[int, ...] = tuple(sorted({*own_ends, *chosen_ends}))
        """Ids that end a completion, from the configuration, the tokenizer and `model.eos_tokens`."""
        if not self.eos_ids:
            raise InputError(
                f"{files.path}: neither generation_config.json, config.json nor the tokenizer has an end-of-sequence "
                "token, so no completion could end; set model.eos_tokens to the tokens that end one"
            )
        # An unused row of the vocabulary has no name.
        names = [name for end in self.eos_ids if (name := str(hf_tokenizer.decode([end])))]
        self.eos_names = pattern_of(names)
        """Matches the names of `eos_ids` in rendered text."""
        known = (hf_tokenizer.pad_token_id, hf_tokenizer.eos_token_id, *self.eos_ids)
        self.pad_id: int = next(token_id for token_id in known if isinstance(token_id, int))
        """Padding id. It may equal an EOS id, so masks must be computed from lengths."""
        unk_id = hf_tokenizer.unk_token_id
        self.unk_id: int | None = unk_id if isinstance(unk_id, int) and unk_id not in self.eos_ids else None
        """Id of the unknown token; None for byte-level tokenizers, which declare their EOS token as unknown."""
        byte_names = [f"<0x{value:02X}>" for value in range(256)]
        byte_ids = [vocabulary[name] for name in byte_names if name in vocabulary]
        self._byte_ids = byte_ids if len(byte_ids) == 256 else []
        """Ids of the tokens for single bytes; empty for tokenizers without them, such as byte-level ones."""
        added = hf_tokenizer.added_tokens_decoder
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special) - {self.unk_id}
        """Ids of control tokens, which are not text."""
        parts = (hf_tokenizer.backend_tokenizer.to_str(), str(hf_tokenizer.chat_template), str(own_ends))
        self.fingerprint: str = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        """Hexadecimal SHA-256 of vocabulary, merges, splitting rules, template, and the EOS ids in the model's
        files."""

    @property
    def encoding_fingerprint(self) -> str:
        """Hexadecimal SHA-256 of vocabulary, merges and splitting rules."""
        return encoding_fingerprint(self._hf_tokenizer)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, control tokens included."""
        return self._hf_tokenizer.get_vocab()

    def chat_ids(self, messages: Messages) -> list[int]:
        """Returns the ids of a chat up to the start of the assistant's next turn; see `ChatTemplate`."""
        return self.template.ids(messages, self.tools, add_generation_prompt=True)

    def conversation_ids(self, messages: Messages) -> list[int]:
        """Returns the ids of a complete chat; see `ChatTemplate`."""
        return self.template.ids(messages, self.tools, add_generation_prompt=False)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of plain text without adding BOS or EOS; names of control tokens are encoded as text."""
        return self._hf_tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def text_ids(self, text: str) -> list[int]:
        """Returns the ids of a complete plain text; see the function `whole_text_ids`."""
        return whole_text_ids(self._hf_tokenizer, text)

    def encode_rendered(self, text: str) -> list[int]:
        """Returns the ids of text that another program rendered: names of control tokens become these tokens."""
        return self._hf_tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids, without control tokens and unknown ids."""
        plain = [int(token_id) for token_id in ids]
        text = self._hf_tokenizer.decode(plain, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def stop_text(self, ids: Iterable[int]) -> str:
        """Returns the text in which stop strings are searched; it has control tokens' names and every valid byte.

        SentencePiece decodes a run of byte tokens only as a whole, so a stray byte would hide the newline before it.
        Here, each invalid byte becomes a separate U+FFFD.
        """
        plain = [int(token_id) for token_id in ids]
        text = self.decode_with_special_tokens(plain)
        if not self._byte_ids or "\ufffd" not in text:
            return text
        byte_of = {token_id: byte for byte, token_id in enumerate(self._byte_ids)}
        parts: list[list[int]] = [[]]
        for is_byte, run in groupby(plain, key=byte_of.__contains__):
            if not is_byte:
                parts[-1] += run
                continue
            pieces = INVALID_BYTE.split(bytes(map(byte_of.__getitem__, run)).decode("utf-8", "surrogateescape"))
            valid, *others = ([self._byte_ids[byte] for byte in piece.encode()] for piece in pieces)
            parts[-1] += valid
            parts += others
        # The decoder drops a space at the start of a text, so every part but the first is decoded with a preceding
        # character.
        letter = self._byte_ids[ord("a")]
        first, *others = parts
        texts = (self.decode_with_special_tokens([letter, *part])[1:] for part in others)
        return "\ufffd".join([self.decode_with_special_tokens(first), *texts])

    def decode_with_special_tokens(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids, with the names of control tokens."""
        return str(self._hf_tokenizer.decode([int(token_id) for token_id in ids], clean_up_tokenization_spaces=False))


def whole_text_ids(hf_tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Returns the ids of a text with the tokenizer's BOS token before it; names of control tokens become these tokens.

    TRL encodes text prompts in this way, but adds a second BOS token to a text that already starts with one.
    """
    bos = hf_tokenizer.bos_token
    has_start = bool(bos) and text.startswith(str(bos))
    return hf_tokenizer.encode(text, add_special_tokens=not has_start)


def encoding_fingerprint(hf_tokenizer: PreTrainedTokenizerFast) -> str:
    """Returns the hexadecimal SHA-256 of vocabulary, merges and splitting rules, which determine the ids of a text."""
    rules = json.loads(hf_tokenizer.backend_tokenizer.to_str())
    # These fields concern batches and depend on the program that saved the file.
    del rules["truncation"], rules["padding"]
    return hashlib.sha256(json.dumps(rules).encode()).hexdigest()


def load_tokenizer(
    files: ModelFiles,
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
    *,
    eos_tokens: Sequence[str | int] = (),
    needs_template: bool = True,
) -> Tokenizer:
    """Loads the tokenizer of an opened model; `template_kwargs` are variables of its chat template.

    Args:
        eos_tokens: texts and ids of tokens that end a completion, in addition to those of the model.
        needs_template: False if it only encodes plain texts.

    Raises:
        InputError: the model has no tokenizer, or it cannot be used.
    """
    tokenizer = Tokenizer(load_fast_tokenizer(files, template_kwargs), files, template_kwargs, eos_tokens)
    if needs_template and not tokenizer.template.exists:
        raise InputError(
            f"{files.path}: the tokenizer has no chat template; for a base model, whose prompts are plain text, set "
            "data.chat_template: none, else add chat_template.jinja, or use an instruct model"
        )
    return tokenizer


def load_fast_tokenizer(files: ModelFiles, template_kwargs: Mapping[str, Any] = NO_KWARGS) -> PreTrainedTokenizerFast:
    """Loads `tokenizer.json` from an opened model's directory, or the tokenizer in its GGUF file.

    Raises:
        InputError: the model has no tokenizer, it cannot be read, its ids exceed the model's vocabulary, or a name in
            `template_kwargs` is an argument of transformers.
    """
    if isinstance(files.weights, GgufFile):
        try:
            tokenizer = _from_gguf(files.weights)
        except InputError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(
                f"{files.path}: the tokenizer's metadata is damaged ({error}); download the file again"
            ) from error
    else:
        tokenizer = _from_directory(files.path)
    if (largest := max(tokenizer.get_vocab().values())) >= _num_rows(files):
        raise InputError(
            f"{files.path}: the tokenizer has ids up to {largest}, but the model's vocab_size is {_num_rows(files)}; "
            "use the tokenizer that was saved with the model"
        )
    own = inspect.signature(type(tokenizer).apply_chat_template).parameters.keys() - {"tools", "documents"}
    if taken := [name for name in template_kwargs if name in (*own, "messages")]:
        raise InputError(f"data.chat_template_kwargs: {taken[0]} is set by this program; remove it")
    return tokenizer


def _from_directory(directory: Path) -> PreTrainedTokenizerFast:
    """Loads `tokenizer.json` unchanged.

    AutoTokenizer would rebuild the pre-tokenizer from the class in tokenizer_config.json. For SmolLM2 this is
    GPT2Tokenizer, which does not split digits as tokenizer.json does.
    """
    if not (directory / TOKENIZER_FILE).is_file():
        raise InputError(f"{directory}: there is no {TOKENIZER_FILE}; save the model's fast tokenizer there")
    try:
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise InputError(
            f"{directory}: the tokenizer files cannot be read: {error}; save or download them again"
        ) from error


def _from_gguf(gguf: GgufFile) -> PreTrainedTokenizerFast:
    """Builds a BPE tokenizer from GGUF metadata.

    Source: llama.cpp, `convert_hf_to_gguf.py` (token types) and `llama-vocab.cpp` (pre-tokenizer names).
    """
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if (model := gguf.metadata("tokenizer.ggml.model")) not in builders:
        raise InputError(
            f"{gguf.path}: tokenizer model {model!r} is not supported, expected 'gpt2' (byte-level BPE) or 'llama' "
            f"(SentencePiece); {WORKAROUND}"
        )
    tokens = gguf.metadata("tokenizer.ggml.tokens")
    if model == "llama":
        # llama.cpp stores tokens of several spaces literally, and every other space as this character.
        tokens = [token if token.strip(" ") else "▁" * len(token) for token in tokens]
    types = gguf.metadata("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    # llama.cpp fills a padded vocabulary with made-up tokens of type "unused".
    kept = {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE}
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind in kept}
    keys = {"eos": "eos", "pad": "padding", "bos": "bos"} | ({"unk": "unknown"} if model == "llama" else {})
    names = {
        f"{name}_token": _token_from_id(gguf, tokens, gguf.metadata(f"tokenizer.ggml.{key}_token_id", -1))
        for name, key in keys.items()
    }
    backend = builders[model](gguf, vocabulary, names.get("unk_token"))
    kinds = zip(tokens, types, strict=True)
    added = [(token, kind) for token, kind in kinds if kind in (CONTROL, USER_DEFINED) and token.strip("▁")]
    backend.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token, kind in added])
    bos = names["bos_token"]
    if bos in vocabulary and gguf.metadata("tokenizer.ggml.add_bos_token", model == "llama"):
        start = [(bos, vocabulary[bos])]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=start)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{**names, "pad_token": names["pad_token"] or names["eos_token"]},
        chat_template=gguf.metadata("tokenizer.chat_template", ""),
    )


def _byte_level_bpe(gguf: GgufFile, vocabulary: dict[str, int], unk: str | None) -> Backend:
    """Builds a byte-level BPE tokenizer, which can encode any text and so needs no unknown token."""
    parts = (str(merge).partition(" ") for merge in gguf.metadata("tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in parts]
    # Otherwise, the tokenizers library would abort.
    unknown = next((merge for merge in merges if not vocabulary.keys() >= {*merge, "".join(merge)}), None)
    if unknown is not None:
        raise InputError(
            f"{gguf.path}: the tokenizer merges {' '.join(unknown)!r:.80}, which is not in its vocabulary; {WORKAROUND}"
        )
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.normalizer, backend.pre_tokenizer = _pre_tokenization(gguf)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(gguf: GgufFile, vocabulary: dict[str, int], unk: str | None) -> Backend:
    """Builds Gemma's tokenizer, whose merges are all splits of a token into two tokens, in vocabulary order.

    Source: transformers, `GemmaTokenizer` and its reading of GGUF files. The scores in the file have a different order.
    """
    if gguf.metadata("general.architecture") != "gemma3" or gguf.metadata("tokenizer.ggml.add_space_prefix", True):
        raise InputError(
            f"{gguf.path}: a SentencePiece tokenizer (model 'llama') is supported for Gemma 3 only; {WORKAROUND}"
        )
    merges = [
        (token[:cut], token[cut:])
        for token in vocabulary
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    bpe = models.BPE(vocab=vocabulary, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    backend = Backend(bpe)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _pre_tokenization(gguf: GgufFile) -> tuple[Any, Any]:
    """Returns the normalizer and pre-tokenizer that `tokenizer.ggml.pre` names."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    qwen2 = [
        pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    known = {
        "gpt-2": (None, byte_level),
        "smollm": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])),
        "qwen2": (normalizers.NFC(), pre_tokenizers.Sequence(qwen2)),
    }
    name = gguf.metadata("tokenizer.ggml.pre")
    if name not in known:
        raise InputError(
            f"{gguf.path}: pre-tokenizer {name!r} is not supported, expected {join_words(known)}; {WORKAROUND}"
        )
    return known[name]


def _token_from_id(gguf: GgufFile, tokens: list[str], token_id: int) -> str | None:
    """Returns the token with this id; None for -1, which means no token."""
    if token_id == -1:
        return None
    if not 0 <= token_id < len(tokens):
        raise InputError(
            f"{gguf.path}: special token id {token_id} is outside the vocabulary of {len(tokens)} tokens; {WORKAROUND}"
        )
    return tokens[token_id]


def _eos_ids(files: ModelFiles, hf_tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Returns the ids that end a completion according to a model's files, in ascending order.

    These are the ids in the generation configuration, which transformers derives from `config.json` if there is none,
    and, as in vLLM, the EOS token of the tokenizer.
    """
    place, named = "generation_config.json", files.generation_config.get("eos_token_id")
    if named is None:
        place, named = "config.json", files.config.get("eos_token_id")
    ids = [*named] if isinstance(named, list) else [] if named is None else [named]
    for token_id in ids:
        if not isinstance(token_id, int) or not 0 <= token_id < _num_rows(files):
            raise InputError(
                f"{files.path}: {place}: expected an id below vocab_size={_num_rows(files)}, or a list of such ids, as "
                f"eos_token_id, got {named!r}; correct the field"
            )
    if isinstance(hf_tokenizer.eos_token_id, int):
        ids.append(hf_tokenizer.eos_token_id)
    return tuple(sorted({*ids}))


def _chosen_eos_id(files: ModelFiles, hf_tokenizer: PreTrainedTokenizerFast, token: str | int) -> int:
    """Returns the id of an entry of `model.eos_tokens`."""
    if isinstance(token, int):
        if token >= _num_rows(files):
            raise InputError(
                f"model.eos_tokens: expected token ids of {files.path} from 0 to {_num_rows(files) - 1}, got {token}"
            )
        return token
    if (known := hf_tokenizer.get_vocab().get(token)) is not None:
        return known
    # The vocabulary may have it under another name, such as `Ċ` for a newline.
    ids = hf_tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1 or ids[0] == hf_tokenizer.unk_token_id:
        raise InputError(
            f"model.eos_tokens: {token!r} is not one token of the tokenizer of {files.path}, but is encoded as "
            f"{hf_tokenizer.convert_ids_to_tokens(ids)}; correct it, or use rollout.stop, which takes any text"
        )
    return ids[0]


def _num_rows(files: ModelFiles) -> int:
    """Returns the number of rows of the embedding; `app.model.io.families` reports a missing vocab_size."""
    rows = files.config.get("vocab_size")
    return rows if isinstance(rows, int) else 2**31
