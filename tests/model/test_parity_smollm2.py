"""Tests of SmolLM2-135M-Instruct from its GGUF file, from its Hugging Face directory, and in transformers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from app.model.segment_layout import single_segment_layout
from tests.model.test_parity import (
    PackedRows,
    import_reference,
    load_ours,
    load_reference,
    our_logits,
    reference_logits,
)

CONVERTER = Path(__file__).resolve().parents[3] / "shared" / "tools" / "convert_smollm2.py"


@pytest.fixture(scope="module")
def converted_smollm2(smollm2_gguf) -> Iterator[Path]:
    """The Hugging Face directory that an independent converter writes from the GGUF file."""
    if not CONVERTER.is_file():
        pytest.skip("the independent converter is not beside this repository")
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: pytest would keep half a gigabyte
        command = [sys.executable, str(CONVERTER), "--gguf", str(smollm2_gguf), "--out", folder]
        subprocess.run(command, check=True, capture_output=True, timeout=240)
        yield Path(folder)


@pytest.mark.slow
def test_smollm2_from_gguf_answers_a_gsm8k_question_with_transformers_logits(
    smollm2_gguf, converted_smollm2, gsm8k_dir
):
    _, transformers = import_reference()
    with (gsm8k_dir / "train.jsonl").open(encoding="utf-8") as lines:
        question = json.loads(next(lines))["question"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted_smollm2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    token_ids = np.asarray(chat["input_ids"], np.int32)
    expected = reference_logits(load_reference(converted_smollm2), token_ids)
    one_row = token_ids[None]
    rows = PackedRows([], one_row, single_segment_layout(np.ones_like(one_row, bool)))
    np.testing.assert_allclose(our_logits(*load_ours(smollm2_gguf), rows)[0], expected, rtol=0, atol=1e-3)
