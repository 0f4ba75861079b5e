"""Tests that transformers and this program load an export as the policy of the checkpoint."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import yaml
from typer.testing import Result

from app.checkpoint.saved_policy import PolicyCheckpoint, load_trained_params
from app.export.huggingface import check_adapters, write_model
from app.export.model_card import ADAPTER, FULL_MODEL, front_matter, model_card
from app.mesh.placement import abstract_arrays
from app.model.decoder import Params
from app.model.io.hf_weights import load_weights
from app.model.lora import combine_params
from app.runtime.model_spec import ModelSpec, read_model_spec
from settings import InputError, Settings, load
from tests.model import reference
from tests.model.io import gguf_files
from tests.program import digest_of, here, metrics_of, settings, succeeded
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
    return jax.tree.map(
        lambda x: jax.device_put(np.asarray(x) + rng.normal(0, 0.05, x.shape).astype(x.dtype), x.sharding), params
    )


def assert_comes_out_whole(folder: Path, model: ModelSpec, params: Params) -> None:
    """Writes weights to `folder`, and asserts that they load bit for bit and give transformers our logits."""
    folder.mkdir()
    assert write_model(folder, model, params, dtype="float32") == ["model.safetensors"]
    assert {path.name for path in folder.iterdir()} >= FILES
    again = model_at(folder)
    assert again.architecture == model.architecture
    assert again.tokenizer.fingerprint == model.tokenizer.fingerprint
    jax.tree.map(np.testing.assert_array_equal, params_of(again), params)
    reference.assert_every_segment_has_the_reference_logits(
        folder, reference.packed_rows(*reference.SHORT_ROWS, vocab_size=model.architecture.vocab_size)
    )


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True, "rope_parameters": reference.LLAMA3, "dtype": "float16"}),
        ("qwen3", {"attention_bias": True, "dtype": "bfloat16"}),
        ("mixtral", {}),
        ("gemma3_text", {"sliding_window_pattern": 2}),
    ],
)
def test_transformers_logits_of_an_export_equal_ours(tmp_path, family, changes):
    base = reference.write_checkpoint(tmp_path / "base", family, num_hidden_layers=2, **changes)
    write_tokenizer(base)
    model = model_at(base)
    assert_comes_out_whole(tmp_path / "trained", model, trained(params_of(model)))


def test_transformers_logits_of_an_exported_gguf_policy_equal_ours(tmp_path):
    tensors = gguf_files.random_checkpoint(biases=False, tied=False)
    # Weights are halved, as in the other families: sharper attention would leave no digits to compare.
    tensors = {name: 0.5 * tensor for name, tensor in tensors.items()}
    tokens = [*CONTROL_TOKENS, *CHARACTERS, "12"]
    tokenizer = partial(gguf_files.add_tokenizer, tokens=tokens, merge="1 2", num_control=len(CONTROL_TOKENS))
    path = gguf_files.write_gguf(tmp_path / "a.gguf", "llama", tensors, extra=[tokenizer])
    model = model_at(path)
    assert_comes_out_whole(tmp_path / "out", model, trained(params_of(model)))


def export(checkpoint: Path, out: Path, *more: str | Path) -> Result:
    return here("export", "--checkpoint", checkpoint, "--out", out, *more)


@pytest.fixture(scope="module")
def exported(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports the newest checkpoint of the finished run; tests must not change the files."""
    out = tmp_path_factory.mktemp("exported") / "model"
    result = succeeded(export(finished, out, "--json"))
    summary = json.loads(result.stdout)
    assert (summary["step"], summary["parameters"], summary["weights"]) == (4, 17_056, "float32 in 1 file")
    assert summary["written to"] == str(out)
    assert summary["load it"] == f"AutoModelForCausalLM.from_pretrained('{out}'), as in README.md there"
    config = ["--config", str(finished / "settings.yaml")]
    assert shlex.split(summary["measure it"]) == ["grpo", "evaluate", *config, "--set", f"model.path={out}"]
    assert summary["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    return out


def test_a_base_model_is_exported_without_a_checkpoint(exported, tiny_model, tmp_path):
    succeeded(here("export", *settings(f"model.path={tiny_model}"), "--out", tmp_path / "out"))
    jax.tree.map(np.testing.assert_array_equal, params_of(model_at(tmp_path / "out")), params_of(model_at(tiny_model)))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in exported.iterdir()}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# tiny as a base model" in card and "without any training" in card and "## Training" not in card


def policy_of(checkpoint: Path, model: ModelSpec) -> Params:
    mesh = make_mesh()
    return PolicyCheckpoint.open(checkpoint).restore_params(
        abstract_arrays(model.definition.shapes, model.definition.shardings(mesh))
    )


def test_the_newest_checkpoint_is_exported_and_loaded_again(exported, finished, tiny_model):
    assert {path.name for path in exported.iterdir()} == FILES | {"README.md", "chat_template.jinja"}
    again, base = model_at(exported), model_at(tiny_model)
    policy = policy_of(finished, base)
    jax.tree.map(np.testing.assert_array_equal, params_of(again), policy)
    assert not np.array_equal(policy["output"], params_of(base)["output"])
    assert again.tokenizer.fingerprint == base.tokenizer.fingerprint
    assert_logits_are_those_of_the_run(reference.load_reference(exported), finished, tiny_model)


def test_an_earlier_checkpoint_can_be_exported_in_bfloat16(finished, tiny_model, tmp_path):
    before, checkpoint = digest_of(finished), finished / "checkpoints" / "2"
    succeeded(export(checkpoint, tmp_path / "out", "--dtype", "bfloat16"))
    policy = policy_of(checkpoint, model_at(tiny_model))
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32), policy)
    again = model_at(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, params_of(again), rounded)
    assert again.files.config["torch_dtype"] == "bfloat16"
    assert digest_of(finished) == before
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| held out | step 0 | step 2 |" in card and "step 4" not in card


def test_the_model_card_lists_settings_and_results(exported, finished):
    text = (exported / "README.md").read_text()
    front, card = text.split("---\n")[1:]
    about = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    assert yaml.safe_load(front) == {**about, "tags": ["grpo", "reinforcement-learning"]}
    lines = card.splitlines()
    assert lines[1] == "# tiny after 4 steps of grpo"
    before, after = (line["eval/accuracy"] for line in metrics_of(finished) if line["step"] in (0, 4))
    assert f"| accuracy | {100 * before:.1f} % | {100 * after:.1f} % |" in lines
    chosen = ('`model.path` | `"tiny"`', "`optimizer.learning_rate` | `0.001`", "`rollout.group_size` | `4`")
    assert {"| held out | step 0 | step 4 |", *(f"| {one} |" for one in chosen)} <= {*lines}, card


def test_the_model_card_contains_no_local_paths_or_api_keys(exported, finished, tiny_model, monkeypatch):
    assert str(finished.parent.parent) not in (exported / "README.md").read_text()
    assert str(tiny_model.parent) not in (exported / "README.md").read_text()
    monkeypatch.setenv("HF_TOKEN", "CANARY-0123456789abcdef")
    resolved = load(None, ["data.system_prompt=CANARY-0123456789abcdef | and `more`"], {})
    alone = replace(PolicyCheckpoint.open(finished), path=Path("/elsewhere/checkpoints/4"))
    card = model_card(resolved, alone, model_at(tiny_model), export_format=FULL_MODEL, dtype="bfloat16")
    assert "CANARY" not in card
    assert "<HF_TOKEN> \\| and" in card
    assert "## Before and after" not in card and "rounded once to bfloat16" in card


def test_exports_with_unusable_arguments_are_refused(finished, tmp_path):
    other = write_base(tmp_path / "other", seed=1)
    (tmp_path / "link").symlink_to("nowhere")
    before = digest_of(tmp_path)
    run = ("--checkpoint", finished)
    out, missing = ("--out", tmp_path / "out"), tmp_path / "no"
    for arguments, message in (
        ((*run, "--out", missing / "out"), f"error: --out: {missing / 'out'}: the folder {missing} does not exist; "),
        *(
            ((*run, "--out", tmp_path / name), f"error: --out: {tmp_path / name} exists already")
            for name in ("other", "link")
        ),
        (run, "missing option --out"),
        (out, "missing option --checkpoint; give a run or one of its checkpoints, or name a base model"),
        (
            (*out, "--adapter", *settings(f"model.path={other}")),
            "or omit --adapter, since an untrained model",
        ),
        ((*out, "--checkpoint", tmp_path), "--checkpoint: no settings.yaml of a run was found in"),
        ((*out, "--checkpoint", tmp_path, "--config", finished / "settings.yaml"), "contains no checkpoint; give"),
        ((*out, "--checkpoint", finished / "checkpoints" / "99"), "no such file or folder"),
        ((*out, *run, "--set", f"model.path={other}"), "was trained from another model than model.path"),
    ):
        result = here("export", *arguments)
        assert (result.exit_code, result.stdout) == (2, ""), result.stderr
        assert result.stderr.count("error: ") == 1 and message in result.stderr
    assert digest_of(tmp_path) == before


def assert_logits_are_those_of_the_run(theirs: Any, run: Path, base: Path, **lora: Any) -> None:
    """Asserts that the logits equal those of the run's unmerged network, and differ from those of the base."""
    model = model_at(base, **lora)
    frozen = params_of(model)
    policy = load_trained_params(PolicyCheckpoint.open(run), model, make_mesh())
    policy = combine_params(policy, frozen if lora else None)
    rows = reference.packed_rows(*reference.SHORT_ROWS, vocab_size=24)
    logits, of_base = (
        reference.our_logits(model.policy_definition, policy, rows),
        reference.our_logits(model.definition, frozen, rows),
    )
    assert np.abs(logits - of_base).max() > (0.1 if lora else 0.01)
    reference.assert_reference_logits(logits, rows, theirs)


def test_merged_adapters_are_exported_as_a_full_model(adapted, exported, tiny_model, tmp_path):
    result = succeeded(export(adapted, tmp_path / "out", "--json"))
    assert json.loads(result.stdout)["parameters"] == 17_056
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in exported.iterdir()}
    assert model_at(tmp_path / "out").architecture == model_at(tiny_model).architecture
    card = (tmp_path / "out" / "README.md").read_text()
    assert "merged into them, in float32" in card and "to rounding" not in card + result.stderr
    assert_logits_are_those_of_the_run(reference.load_reference(tmp_path / "out"), adapted, tiny_model, **LORA)


# peft asks transformers for a property by its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_loads_exported_adapters(adapted, tiny_model, tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    result = succeeded(export(adapted, tmp_path / "out", "--adapter", "--json"))
    # In each layer: query and value (32 in, 32 and 16 out), gate and up (48 out), down (48 in).
    assert json.loads(result.stdout)["parameters"] == 2 * 3 * (64 + 48 + 80 + 80 + 80)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"} <= written
    assert not written & {"config.json", "model.safetensors"}
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1, "others may read all or none"
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["lora_alpha"]) == (str(tiny_model), 3, 6)
    assert config["target_modules"] == ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    both = front_matter(ADAPTER, "some/model", "hf:openai/gsm8k:main").to_dict()
    assert (both["base_model"], both["library_name"], both["base_model_relation"]) == ("some/model", "peft", "adapter")
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32").eval()
    assert_logits_are_those_of_the_run(theirs, adapted, tiny_model, **LORA)


def test_export_refuses_missing_or_different_adapters_and_notes_rounding(adapted, finished, tiny_model, tmp_path):
    with pytest.raises(InputError, match=r"`grpo export --set model.path=builtin:tiny --out base-hf` and"):
        check_adapters("builtin:tiny", PolicyCheckpoint.open(adapted), model_at(tiny_model, **LORA))
    for run, arguments, message in (
        (finished, ["--adapter"], "contains all weights and no adapters: its run had no model.lora.rank"),
        (adapted, settings("model.lora.rank=4"), "contains adapters of rank 3, alpha 6,"),
        (adapted, settings("model.lora.rank=null"), "but model.lora requests none"),
    ):
        result = export(run, tmp_path / "out", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    assert not any(tmp_path.iterdir())
    # A note says that merged adapters are rounded.
    result = export(adapted, tmp_path / "out", "--dtype", "bfloat16")
    note = "adapters merged in bfloat16 lose small weight changes to rounding"
    assert f"note: {note}" in result.stderr and note in (tmp_path / "out" / "README.md").read_text()


@pytest.fixture
def copied_run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def change(copied_run: Path, name: str, value: str) -> None:
    """Changes a setting as if the run had started with it, and removes the record of its sessions."""
    (copied_run / "sessions.jsonl").unlink(missing_ok=True)
    file = copied_run / "settings.yaml"
    text, num_changed = re.subn(rf"(?m)^( +{name}:).*$", rf"\1 {value}  # --set", file.read_text(), count=1)
    assert num_changed == 1, name
    file.write_text(text)


def card_of(copied_run: Path, model: Path, *overrides: str) -> str:
    saved, read = PolicyCheckpoint.open(copied_run), model_at(model)
    return model_card(load(None, overrides, {}), saved, read, export_format=FULL_MODEL, dtype="float32")


def test_the_model_card_says_how_many_prompts_and_answers_were_evaluated(copied_run: Path, tiny_model: Path) -> None:
    for num_prompts, num_samples, said in (
        ("20", "1", "At most 20 held-out prompts of `builtin:arithmetic`, one answer each at temperature 0"),
        ("null", "4", "All held-out prompts of `builtin:arithmetic`, 4 answers each at temperature 0"),
    ):
        change(copied_run, "num_prompts", num_prompts)
        change(copied_run, "num_samples", num_samples)
        assert said in card_of(copied_run, tiny_model)


def test_a_model_card_without_readable_metrics_has_no_results(copied_run, tiny_model, capsys):
    (copied_run / "metrics.jsonl").write_text("damaged\n{}\n")
    card = card_of(copied_run, tiny_model)
    assert "## Before and after" not in card and "## Training" in card
    assert "note: the model card has no results of the run: " in capsys.readouterr().err


def test_model_cards_list_data_without_folders_and_changed_settings(copied_run: Path, tiny_model: Path) -> None:
    assert "add_generation_prompt=True, return_tensors" in card_of(copied_run, tiny_model)
    change(copied_run, "source", "for_acme/secret/train.jsonl")
    change(copied_run, "eval_source", "for_acme/secret/test.jsonl")
    change(copied_run, "chat_template_kwargs", "{enable_thinking: false}")
    change(copied_run, "rank", "8")
    card = card_of(copied_run, tiny_model, "model.path=for_acme/secret/tiny")
    assert "acme" not in card
    assert "add_generation_prompt=True, enable_thinking=False, return_tensors" in card
    for name, value in (
        ("model.path", '"tiny"'),
        ("model.lora.rank", "8"),
        ("data.source", '"train.jsonl"'),
        ("data.chat_template_kwargs", '{"enable_thinking": false}'),
    ):
        assert f"| `{name}` | `{value}` |" in card
    assert "of `test.jsonl`, one answer each" in card
    parts = "{source: for_acme/a.jsonl, weight: 3.0}, {source: 'hf:openai/gsm8k:main'}, {source: 'hf:a/b'}"
    change(copied_run, "source", f"[{parts}]")
    card = card_of(copied_run, tiny_model)
    assert "on `a.jsonl`, `hf:openai/gsm8k:main`, `hf:a/b`: step" in card and "acme" not in card
    assert yaml.safe_load(card.split("---\n")[1])["datasets"] == ["openai/gsm8k", "a/b"]


def test_model_cards_name_a_hub_base_with_its_commit(copied_run: Path, tiny_model: Path) -> None:
    model = model_at(tiny_model)
    fetched = replace(model, files=replace(model.files, name="some/model", commit="c0ffee"))
    resolved = load(None, ["model.path=some/model"], {})
    card = model_card(resolved, PolicyCheckpoint.open(copied_run), fetched, export_format=FULL_MODEL, dtype="float32")
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "some/model"
    assert '| `model.path` | `"some/model@c0ffee"` |' in card
    assert "# model after 4 steps of grpo" in card
    assert str(tiny_model) in (copied_run / "settings.yaml").read_text() and str(tiny_model) not in card
