from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from app.checkpoint.saved_policy import PolicyCheckpoint
from app.export.model_card import FULL_MODEL, model_card
from app.runtime.model_spec import read_model_spec
from settings import Settings, load


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run that tests may change."""
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def change(run: Path, name: str, value: str) -> None:
    """Changes a setting as if the run had started with it, and written no line per session, as older versions."""
    (run / "sessions.jsonl").unlink(missing_ok=True)
    file = run / "settings.yaml"
    text, num_changed = re.subn(rf"(?m)^( +{name}:).*$", rf"\1 {value}  # --set", file.read_text(), count=1)
    assert num_changed == 1, name
    file.write_text(text)


def card_of(run: Path, model: Path, *overrides: str) -> str:
    read = read_model_spec(Settings.model_validate({"model": {"path": str(model)}}))
    return model_card(
        load(None, overrides, {}), PolicyCheckpoint.open(run), read, export_format=FULL_MODEL, dtype="float32"
    )


@pytest.mark.parametrize(
    ("num_prompts", "num_samples", "said"),
    [
        ("20", "1", "At most 20 held-out prompts of `builtin:arithmetic`, one answer each at temperature 0"),
        ("null", "4", "All held-out prompts of `builtin:arithmetic`, 4 answers each at temperature 0"),
    ],
)
def test_the_card_says_how_many_prompts_and_answers_an_evaluation_took(
    run: Path, tiny_model: Path, num_prompts: str, num_samples: str, said: str
) -> None:
    change(run, "num_prompts", num_prompts)
    change(run, "num_samples", num_samples)
    assert said in card_of(run, tiny_model)


def test_a_run_of_which_no_figures_can_be_read_has_a_card_without_them(
    run: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "metrics.jsonl").write_text("damaged\n{}\n")
    card = card_of(run, tiny_model)
    assert "## Before and after" not in card and "## Training" in card
    assert "note: the model card has no results of the run: " in capsys.readouterr().err


def test_what_adapters_were_is_told_of_a_run_that_had_some(run: Path, tiny_model: Path) -> None:
    assert "model.lora" not in card_of(run, tiny_model)
    change(run, "rank", "8")
    assert "| `model.lora.rank` | `8` |" in card_of(run, tiny_model)


def test_of_a_relative_path_the_last_name_alone_is_told(run: Path, tiny_model: Path) -> None:
    change(run, "source", "for_acme/secret/train.jsonl")
    change(run, "eval_source", "for_acme/secret/test.jsonl")
    card = card_of(run, tiny_model, "model.path=for_acme/secret/tiny")
    assert "acme" not in card
    for name in ('`model.path` | `"tiny"`', '`data.source` | `"train.jsonl"`', "of `test.jsonl`, one answer each"):
        assert name in card
    change(run, "source", "hf:openai/gsm8k")
    assert '`data.source` | `"hf:openai/gsm8k"`' in card_of(run, tiny_model)


def test_a_base_of_the_hub_is_named_though_the_run_had_a_copy_of_it_here(run: Path, tiny_model: Path) -> None:
    model = read_model_spec(Settings.model_validate({"model": {"path": str(tiny_model)}}))
    fetched = replace(model, files=replace(model.files, name="some/model", commit="c0ffee"))
    resolved = load(None, ["model.path=some/model"], {})
    card = model_card(resolved, PolicyCheckpoint.open(run), fetched, export_format=FULL_MODEL, dtype="float32")
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "some/model"
    assert '| `model.path` | `"some/model@c0ffee"` |' in card
    assert "# model after 4 steps of grpo" in card
    assert str(tiny_model) in (run / "settings.yaml").read_text() and str(tiny_model) not in card


def test_variables_of_the_chat_template_are_in_the_example_and_the_table(run: Path, tiny_model: Path) -> None:
    assert "add_generation_prompt=True, return_tensors" in card_of(run, tiny_model)
    change(run, "chat_template_kwargs", "{enable_thinking: false}")
    card = card_of(run, tiny_model)
    assert "add_generation_prompt=True, enable_thinking=False, return_tensors" in card
    assert '| `data.chat_template_kwargs` | `{"enable_thinking": false}` |' in card


def test_all_sources_of_a_mixture_are_named_without_their_directories(run: Path, tiny_model: Path) -> None:
    parts = "{source: for_acme/a.jsonl, weight: 3.0}, {source: 'hf:openai/gsm8k:main'}, {source: 'hf:a/b'}"
    change(run, "source", f"[{parts}]")
    card = card_of(run, tiny_model)
    assert "on `a.jsonl`, `hf:openai/gsm8k:main`, `hf:a/b`: step" in card and "acme" not in card
    assert yaml.safe_load(card.split("---\n")[1])["datasets"] == ["openai/gsm8k", "a/b"]
