"""Compares grpo with transformers and llama.cpp on real weights in GGUF files, and prints a table.

    python scripts/bench/real_weights.py --gsm8k test.jsonl [--prompts 16] [--tokens 64] [--llama-python PYTHON] FILE...

`scripts/fetch_model.sh` downloads FILE. Everything is in float32 on the CPU, and PyTorch must be installed. Prompts are
questions of GSM8K, as chats if the file has a chat template. Our texts and logprobs are from `grpo.rollout`.
transformers reads the same file, gets the same ids and generates in one left-padded batch. GGUF files lack the text
normalization of Qwen's tokenizer and the digit splitting of SmolLM2's, and transformers does not restore them, so the
ids of a prompt may differ at decomposed letters or at two spaces before a digit.

PYTHON is an interpreter with llama-cpp-python. llama.cpp gets the weights as float32 in a temporary file: its matmuls
with quantized weights also quantize the activations, so texts would differ after tokens with nearly equal logits (with
SmolLM2, only 11 of 16 texts are then equal). The exit code is 1 if a bound is violated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize

import grpo
from app.mesh.device_mesh import make_mesh
from app.model.decoder import DecoderDefinition
from app.model.io.families import architecture_from_config
from app.model.io.hf_weights import load_weights
from app.model.io.model_files import open_model
from app.model.segment_layout import single_segment_layout
from app.prompts.tokenizer import Tokenizer, load_tokenizer
from settings.schema.mesh import MeshSettings

try:
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"{error.name} is not installed: this script compares with transformers on PyTorch")

NUM_LOGIT_PROMPTS = 4
MAX_PROMPT_LENGTH = 512
LLAMA_TOKENS = 32
REWRITTEN = ("general.architecture", "general.file_type", "general.quantization_version")
LLAMA_CPP = """
import json, sys
import llama_cpp
defaults = llama_cpp.llama_model_default_params
def without_repacked_weights():
    params = defaults()
    params.use_extra_bufts = False  # Virtual machines may announce matrix units (AMX) and crash in them.
    return params
llama_cpp.llama_cpp.llama_model_default_params = without_repacked_weights
# Keys and values in float32, too.
model = llama_cpp.Llama(sys.argv[1], n_ctx=1024, n_batch=1024, type_k=0, type_v=0, verbose=False)
for line in sys.stdin:
    ids, texts = json.loads(line), []
    for token, _ in zip(model.generate(ids, temp=0.0, repeat_penalty=1.0), range(int(sys.argv[2]))):
        texts.append(token)
    print(json.dumps(texts), flush=True)
"""


class Figure(NamedTuple):
    """A measured value and its bound: the maximum or, with `at_least`, the minimum; None for no bound."""

    name: str
    value: float
    bound: float | None
    at_least: bool = False

    @property
    def is_within(self) -> bool:
        return self.bound is None or (self.value >= self.bound if self.at_least else self.value <= self.bound)


def rollout(path: Path, rows: Sequence[Mapping[str, str]], num_tokens: int, **overrides: Any) -> list[Any]:
    """Generates one sample per prompt with `grpo.rollout`; returns the samples as JSON objects."""
    samples = grpo.rollout(
        None,
        {
            "model.path": str(path),
            "model.dtype": "float32",
            "rollout.group_size": 1,
            "rollout.max_new_tokens": num_tokens,
            "data.max_prompt_length": MAX_PROMPT_LENGTH,
            **overrides,
        },
        data=rows,
    )
    assert samples is not None
    return list(samples.records)


def our_logits(path: Path, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    files = open_model(str(path))
    definition = DecoderDefinition.create(architecture_from_config(files.config))
    params = load_weights(definition, files.weights, make_mesh(MeshSettings()))
    jax.config.update("jax_default_matmul_precision", "highest")

    @jax.jit
    def logits(params: Any, row: Any, layout: Any) -> Any:
        decoder = definition.bind(params)
        return decoder.head.logits(decoder.hidden(row, layout, dtype=jnp.dtype("float32")))

    rows = [np.asarray([ids], np.int32) for ids in prompts]
    return [np.asarray(logits(params, row, single_segment_layout(np.ones_like(row, bool)))[0]) for row in rows]


class Reference:
    """Model and tokenizer as transformers reads them from the GGUF file."""

    def __init__(self, path: Path) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        place: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        loader: Any = transformers.AutoModelForCausalLM
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**place)
        self.model: Any = loader.from_pretrained(**place, dtype=torch.float32).eval()

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            return self.model(torch.as_tensor([list(ids)])).logits[0].numpy()

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> np.ndarray:
        logits = torch.as_tensor(self.logits([*prompt, *completion])[len(prompt) - 1 : -1])
        return torch.log_softmax(logits, -1).numpy()[np.arange(len(completion)), list(completion)]

    def greedy(self, prompts: Sequence[Sequence[int]], ends: Sequence[int], num_tokens: int) -> list[list[int]]:
        """Decodes greedily; returns the ids of each completion up to and including the first of the tokens `ends`."""
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), ends[0])
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.as_tensor(list(prompt))
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=num_tokens,
                eos_token_id=list(ends),
                pad_token_id=ends[0],
            )
        return [up_to_end(row, ends) for row in out[:, longest:].tolist()]


def write_float32(path: Path, folder: Path) -> Path:
    """Writes a copy of a GGUF file with float32 tensors to `folder`, and returns its path."""
    reader, out = GGUFReader(path), folder / path.name
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in REWRITTEN:
            kind, *inner = field.types
            writer.add_key_value(key, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = dequantize(np.asarray(tensor.data), tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values.reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def up_to_end(ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    first = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return list(ids[: first + 1])


def num_equal(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> int:
    return sum(list(one) == list(other) for one, other in zip(ours, theirs, strict=True))


def tokenizer_figures(ours: Tokenizer, theirs: Any, rows: Sequence[Mapping[str, str]]) -> list[Figure]:
    """Counts differences between the tokenizers in templates and special tokens, and prompts with equal ids."""
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    if ours.template.exists:
        ids = [ours.chat_ids(chat) for chat in chats]
        theirs_ids = [theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    else:
        ids, theirs_ids = ([encode(row["question"]) for row in rows] for encode in (ours.text_ids, theirs.encode))
    special = {token_id for token_id, token in theirs.added_tokens_decoder.items() if token.special}
    own = ours._hf_tokenizer
    differing_names = [
        name
        for name in ("bos_token", "eos_token", "pad_token", "chat_template")
        if (getattr(own, name) or None) != getattr(theirs, name)
    ]
    # Only transformers treats the token for unknown text as special.
    differing = ours.special_ids.symmetric_difference(special) - {theirs.unk_token_id}
    return [
        Figure("special ids that differ", len(differing), 0),
        Figure("start, end, padding tokens and template that differ", len(differing_names), 0),
        Figure("end ids without transformers' own", int(theirs.eos_token_id not in ours.eos_ids), 0),
        Figure(f"prompts of {len(rows)} with equal ids", num_equal(ids, theirs_ids), None),
    ]


def compare(path: Path, rows: Sequence[Mapping[str, str]], num_tokens: int, llama: str | None) -> list[Figure]:
    tokenizer = load_tokenizer(open_model(str(path)), needs_template=False)
    template = {} if tokenizer.template.exists else {"data.chat_template": "none"}
    greedy = rollout(path, rows, num_tokens, **template, **{"rollout.temperature": 0})
    sampled = rollout(path, rows, num_tokens, **template)
    prompts = [sample["prompt_token_ids"] for sample in greedy]
    texts = [sample["completion_token_ids"] for sample in greedy]
    logits = our_logits(path, prompts[:NUM_LOGIT_PROMPTS])

    reference = Reference(path)
    figures = tokenizer_figures(tokenizer, reference.tokenizer, rows)
    expected = [reference.logits(ids) for ids in prompts[:NUM_LOGIT_PROMPTS]]
    errors = [np.abs(one - other).max() / np.abs(other).max() for one, other in zip(logits, expected, strict=True)]
    figures.append(Figure("logits: error / largest", max(errors), 1e-3))
    theirs = reference.greedy(prompts, tokenizer.eos_ids, num_tokens)
    figures.append(Figure(f"greedy texts of {len(rows)} equal", num_equal(texts, theirs), len(rows), at_least=True))
    errors = [
        np.abs(reference.logprobs(s["prompt_token_ids"], s["completion_token_ids"]) - s["behavior_logprobs"])
        for s in (*sampled, *greedy)
    ]
    figures.append(Figure("logprobs: largest error", np.concatenate(errors).max(), 1e-4))
    figures.append(Figure("logprobs: mean error", np.concatenate(errors).mean(), None))
    if llama:
        length = min(LLAMA_TOKENS, num_tokens)
        lines = "".join(json.dumps(list(ids)) + "\n" for ids in prompts)
        with tempfile.TemporaryDirectory() as folder:
            command = [llama, "-c", LLAMA_CPP, str(write_float32(path, Path(folder))), str(length)]
            done = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True)
        theirs = [up_to_end(json.loads(line), tokenizer.eos_ids) for line in done.stdout.splitlines()]
        equal = num_equal([ids[:length] for ids in texts], theirs)
        figures.append(Figure(f"llama.cpp: greedy texts of {len(rows)} equal", equal, 0.75 * len(rows), at_least=True))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="GGUF file")
    parser.add_argument("--gsm8k", type=Path, required=True, help="JSON Lines of questions and answers")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="length of texts")
    parser.add_argument("--llama-python", help="interpreter with llama-cpp-python")
    arguments = parser.parse_args()
    lines = arguments.gsm8k.read_text(encoding="utf-8").splitlines()[: arguments.prompts]
    rows = [json.loads(line) for line in lines]
    is_within = True
    for path in arguments.files:
        print(f"\n{path.name}", flush=True)
        for figure in compare(path, rows, arguments.tokens, arguments.llama_python):
            sign = "" if figure.bound is None else f"{'>=' if figure.at_least else '<='} {figure.bound:g}"
            verdict = "" if figure.is_within else "  OUT OF BOUND"
            print(f"  {figure.name:52s} {figure.value:10.3g}  {sign}{verdict}", flush=True)
            is_within &= figure.is_within
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
