"""Tests that transformers and this program load an export as the policy of the checkpoint."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import yaml
from typer.testing import Result

from app.checkpoint.saved_policy import PolicyCheckpoint, load_trained_params
from app.export.huggingface import write_model
from app.export.model_card import ADAPTER, FULL_MODEL, front_matter, model_card
from app.model.decoder import Params
from app.model.io.hf_weights import load_weights
from app.model.lora import combine_params
from app.runtime.model_spec import ModelSpec, read_model_spec
from settings import Settings, load
from tests.model.io import test_gguf
from tests.model.test_parity import (
    LLAMA3,
    ONE_KV_HEAD,
    SHORT_ROWS,
    assert_every_segment_has_the_reference_logits,
    load_reference,
    our_logits,
    packed_rows,
    reference_logits,
    write_checkpoint,
)
from tests.program import digest_of, here, metrics_of, settings
from tests.run_fixtures import LORA
from tests.tiny import make_mesh
from tests.tiny_directory import CHARACTERS, CONTROL_TOKENS, write_tokenizer
from tests.tiny_directory import write_model as write_base

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def model_at(path: Path | str, **lora: Any) -> ModelSpec:
    return read_model_spec(Settings.model_validate({"model": {"path": str(path), "lora": lora}}))


def params_of(model: ModelSpec) -> Params:
    return load_weights(model.definition, model.files.weights, make_mesh())


def trained(params: Params) -> Params:
    """Returns weights that all differ, as after training."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + jax.numpy.asarray(rng.normal(0, 0.05, x.shape), x.dtype), params)


def assert_comes_out_whole(folder: Path, model: ModelSpec, params: Params) -> None:
    """Writes weights to `folder`, and asserts that they load bit for bit and give transformers our logits."""
    folder.mkdir()
    assert write_model(folder, model, params, dtype="float32") == ["model.safetensors"]
    assert {path.name for path in folder.iterdir()} >= FILES
    again = model_at(folder)
    assert again.architecture == model.architecture
    assert again.tokenizer.fingerprint == model.tokenizer.fingerprint
    jax.tree.map(np.testing.assert_array_equal, params_of(again), params)
    assert_every_segment_has_the_reference_logits(
        folder, packed_rows(*SHORT_ROWS, vocab_size=model.architecture.vocab_size)
    )


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("llama", {"dtype": "float16"}, id="llama-float16"),
        pytest.param("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}, id="llama-tied-llama3"),
        pytest.param("mistral", ONE_KV_HEAD, id="mistral"),
        pytest.param("qwen2", {"tie_word_embeddings": True, "dtype": "bfloat16"}, id="qwen2-tied-bfloat16"),
        pytest.param("qwen3", {"attention_bias": True}, id="qwen3"),
        pytest.param("mixtral", {}, id="mixtral"),
        pytest.param("qwen3_moe", {"norm_topk_prob": False}, id="qwen3_moe"),
        pytest.param("gemma2", {"tie_word_embeddings": True}, id="gemma2-tied"),
        pytest.param("gemma3_text", {}, id="gemma3_text"),
    ],
)
def test_transformers_gives_the_policys_logits_in_every_family(tmp_path, family, changes):
    base = write_checkpoint(tmp_path / "base", family, **changes)
    write_tokenizer(base)
    model = model_at(base)
    assert_comes_out_whole(tmp_path / "trained", model, trained(params_of(model)))


def tokenizer_of_gguf(writer: Any) -> None:
    tokens = [*CONTROL_TOKENS, *CHARACTERS, "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL_TOKENS) + [1] * (len(tokens) - len(CONTROL_TOKENS)))
    writer.add_token_merges(["1 2"])
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")


def test_a_policy_from_a_gguf_file_has_its_heads_rows_in_the_order_of_hugging_face(tmp_path):
    tensors = test_gguf.random_checkpoint(biases=False, tied=False)
    # As large as in the other families: such sharp attention leaves no digits to compare.
    tensors = {name: 0.5 * tensor for name, tensor in tensors.items()}
    path = test_gguf.write_gguf(tmp_path / "a.gguf", "llama", tensors, extra=[tokenizer_of_gguf])
    model = model_at(path)
    assert_comes_out_whole(tmp_path / "out", model, trained(params_of(model)))


def export(checkpoint: Path, out: Path, *more: str | Path) -> Result:
    return here("export", "--checkpoint", checkpoint, "--out", out, *more)


@pytest.fixture(scope="module")
def exported(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported newest checkpoint of the finished run, which tests must not change."""
    out = tmp_path_factory.mktemp("exported") / "model"
    result = export(finished, out, "--json")
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert (summary["step"], summary["parameters"], summary["weights"]) == (4, 17_056, "float32 in 1 file")
    assert summary["written to"] == str(out)
    assert summary["load it"] == f"AutoModelForCausalLM.from_pretrained('{out}'), as in README.md there"
    config = ["--config", str(finished / "settings.yaml")]
    assert shlex.split(summary["measure it"]) == ["grpo", "evaluate", *config, "--set", f"model.path={out}"]
    assert summary["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    return out


def policy_of(checkpoint: Path, model: ModelSpec) -> Params:
    mesh = make_mesh()
    return PolicyCheckpoint.open(checkpoint).restore_params(model.definition.shapes, model.definition.shardings(mesh))


def test_a_runs_newest_checkpoint_comes_out_and_goes_in_again(exported, finished, tiny_model):
    assert {path.name for path in exported.iterdir()} == FILES | {"README.md", "chat_template.jinja"}
    again, base = model_at(exported), model_at(tiny_model)
    policy = policy_of(finished, base)
    jax.tree.map(np.testing.assert_array_equal, params_of(again), policy)
    assert not np.array_equal(policy["output"], params_of(base)["output"])
    assert again.tokenizer.fingerprint == base.tokenizer.fingerprint
    rows = packed_rows(*SHORT_ROWS, vocab_size=24)
    logits, reference = our_logits(base.definition, policy, rows), load_reference(exported)
    for row, first, token_ids in rows.segments:
        expected = reference_logits(reference, token_ids)
        np.testing.assert_allclose(logits[row, first : first + len(token_ids)], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "step"), [("checkpoints/2", 2), ("checkpoints/best", None)])
def test_any_checkpoint_of_a_run_can_be_chosen(finished, tiny_model, tmp_path, name, step):
    before = digest_of(finished)
    result = export(finished / name, tmp_path / "out", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.stderr
    step = step or int((finished / name).resolve().name)
    policy = policy_of(finished / "checkpoints" / str(step), model_at(tiny_model))
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32), policy)
    again = model_at(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, params_of(again), rounded)
    assert again.files.config["torch_dtype"] == "bfloat16"
    assert digest_of(finished) == before


def test_the_card_tells_what_training_changed(exported, finished):
    text = (exported / "README.md").read_text()
    front, card = text.split("---\n")[1:]
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "reinforcement-learning"],
    }
    lines = card.splitlines()
    assert lines[1] == "# tiny after 4 steps of grpo"
    before, after = (line["eval/accuracy"] for line in metrics_of(finished) if line["step"] in (0, 4))
    assert f"| accuracy | {100 * before:.1f} % | {100 * after:.1f} % |" in lines
    for line in (
        "| held out | step 0 | step 4 |",
        '| `model.path` | `"tiny"` |',
        "| `optimizer.learning_rate` | `0.001` |",
    ):
        assert line in lines, card
    assert "| `rollout.group_size` | `4` |" in lines


def test_the_card_of_an_earlier_checkpoint_tells_nothing_of_later_steps(finished, tiny_model):
    card = model_card(
        load(None, [], {}),
        PolicyCheckpoint.open(finished / "checkpoints/2"),
        model_at(tiny_model),
        export_format=FULL_MODEL,
        dtype="float32",
    )
    assert "| held out | step 0 | step 2 |" in card
    assert "step 4" not in card


def test_the_card_tells_nobody_where_this_machine_keeps_its_files_or_its_keys(
    exported, finished, tiny_model, monkeypatch
):
    assert str(finished.parent.parent) not in (exported / "README.md").read_text()
    assert str(tiny_model.parent) not in (exported / "README.md").read_text()
    monkeypatch.setenv("HF_TOKEN", "CANARY-0123456789abcdef")
    resolved = load(None, ["data.system_prompt=CANARY-0123456789abcdef | and `more`"], {})
    alone = replace(PolicyCheckpoint.open(finished), path=Path("/elsewhere/checkpoints/4"))
    card = model_card(resolved, alone, model_at(tiny_model), export_format=FULL_MODEL, dtype="bfloat16")
    assert "CANARY" not in card
    assert "<HF_TOKEN> \\| and" in card
    assert "## Before and after" not in card and "rounded once to bfloat16" in card


def test_the_card_of_adapters_for_a_model_of_the_hub_names_both():
    both = front_matter(ADAPTER, "some/model", "hf:openai/gsm8k:main").to_dict()
    assert (both["base_model"], both["library_name"], both["base_model_relation"]) == ("some/model", "peft", "adapter")
    assert both["datasets"] == ["openai/gsm8k"]


def test_what_exists_is_not_written_over(finished, tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    for name in ("file", "folder", "link"):
        result = export(finished, tmp_path / name)
        assert result.exit_code == 2
        assert f"error: --out: {tmp_path / name} exists already; give the name of a new folder" in result.stderr
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "kept"


def test_what_cannot_be_exported_is_one_message_and_nothing_on_disk(finished, tmp_path):
    other = write_base(tmp_path / "other", seed=1)
    before = digest_of(tmp_path)
    run = ("--checkpoint", finished)
    out = ("--out", tmp_path / "out")
    for arguments, message in (
        ((*run, "--out", tmp_path / "no" / "out"), f"the folder {tmp_path / 'no'} does not exist; create it first"),
        (run, "missing option --out"),
        (out, "missing option --checkpoint"),
        ((*out, "--checkpoint", tmp_path), "--checkpoint: no settings.yaml of a run was found in"),
        (
            (*out, "--checkpoint", tmp_path, "--config", finished / "settings.yaml"),
            "holds no checkpoint; give <run>/checkpoints/<step>",
        ),
        ((*out, "--checkpoint", finished / "checkpoints" / "99"), "there is no folder"),
        ((*out, *run, "--set", f"model.path={other}"), "was trained from another model, not from that of model.path"),
    ):
        result = here("export", *arguments)
        assert (result.exit_code, result.stdout) == (2, ""), result.stderr
        assert result.stderr.count("error: ") == 1 and message in result.stderr
    assert digest_of(tmp_path) == before


def assert_logits_are_those_of_the_run(reference: Any, run: Path, base: Path) -> None:
    """Asserts that the logits equal those of the run's unmerged network, and differ from those of the base."""
    model = model_at(base, **LORA)
    frozen = params_of(model)
    policy = combine_params(load_trained_params(PolicyCheckpoint.open(run), model, make_mesh()), frozen)
    rows = packed_rows(*SHORT_ROWS, vocab_size=24)
    logits, of_base = our_logits(model.policy_definition, policy, rows), our_logits(model.definition, frozen, rows)
    assert np.abs(logits - of_base).max() > 0.1
    for row, first, token_ids in rows.segments:
        expected = reference_logits(reference, token_ids)
        np.testing.assert_allclose(logits[row, first : first + len(token_ids)], expected, rtol=0, atol=1e-4)


def test_adapters_are_merged_into_a_model_that_needs_nothing_else(adapted, exported, tiny_model, tmp_path):
    result = export(adapted, tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["parameters"] == 17_056
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in exported.iterdir()}
    assert model_at(tmp_path / "out").architecture == model_at(tiny_model).architecture
    card = (tmp_path / "out" / "README.md").read_text()
    assert "merged into them, in float32" in card and "to rounding" not in card + result.stderr
    assert_logits_are_those_of_the_run(load_reference(tmp_path / "out"), adapted, tiny_model)


def test_what_rounding_takes_from_merged_adapters_is_told(adapted, tmp_path):
    result = export(adapted, tmp_path / "out", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.stderr
    note = "adapters merged in bfloat16 lose small weight changes to rounding"
    assert f"note: {note}" in result.stderr and note in (tmp_path / "out" / "README.md").read_text()


# peft asks transformers for a property by its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_alone_are_loaded_by_peft_over_the_base_that_they_name(adapted, tiny_model, tmp_path):
    peft = pytest.importorskip("peft", reason="what loads adapters elsewhere")
    result = export(adapted, tmp_path / "out", "--adapter", "--json")
    assert result.exit_code == 0, result.stderr
    # Of each layer: query and value (32 in, 32 and 16 out), gate and up (48 out), down (48 in).
    assert json.loads(result.stdout)["parameters"] == 2 * 3 * (64 + 48 + 80 + 80 + 80)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"} <= written
    assert not written & {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["lora_alpha"]) == (str(tiny_model), 3, 6)
    assert config["target_modules"] == ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32").eval()
    assert_logits_are_those_of_the_run(theirs, adapted, tiny_model)


def test_adapters_that_are_not_there_or_not_those_asked_for_are_refused(adapted, finished, tmp_path):
    for run, arguments, message in (
        (finished, ["--adapter"], "holds all weights and no adapters: its run had no model.lora.rank"),
        (adapted, settings("model.lora.rank=4"), "holds adapters of rank 3, alpha 6,"),
        (adapted, settings("model.lora.rank=null"), "but model.lora requests none"),
    ):
        result = export(run, tmp_path / "out", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    assert not any(tmp_path.iterdir())
