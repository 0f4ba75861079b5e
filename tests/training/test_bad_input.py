"""Tests that unusable input gives one clear error with exit code 2, and changes nothing on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from app.mesh import devices
from app.mesh.placement import num_local_row_shards
from app.training.setup import check_mini_batch_alias, prepare_run
from settings import load
from settings.errors import InputError
from tests.program import digest_of, here, settings, train_here
from tests.tiny import make_mesh
from tests.tiny_directory import CONFIG, write_model, write_reward_model, write_tokenizer


def refused(config: Path, *overrides: str, resume: str = "never") -> str:
    """Returns the error of `grpo train`, after checking that nothing else happened."""
    before = digest_of(config.parent)
    folders = {path for path in config.parent.rglob("*") if path.is_dir()}
    result = train_here(config, *overrides, resume=resume)
    assert result.exit_code == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 2, "a settings check may find two things wrong"
    assert digest_of(config.parent) == before
    assert {path for path in config.parent.rglob("*") if path.is_dir()} == folders
    return result.stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.stepz=3", "did you mean run.steps?"),
        ("data.max_prompt_length=200", "200 + 4 = 204 tokens, but the context of"),
        ("checkpoint.best_metric=eval/acuracy", "or null to keep no best checkpoint; did you mean eval/accuracy?"),
        (
            "model.attention=kernel",
            "there is no attention kernel for cpu devices (cpu)",
        ),
        ("mesh.shape='3,1,1'", "mesh.shape: '3,1,1' needs 3 devices, but there are 8"),
    ],
)
def test_a_setting_that_cannot_be(config: Path, override: str, message: str) -> None:
    assert message in refused(config, override)


def test_samples_that_do_not_divide_over_the_devices(config: Path) -> None:
    assert num_local_row_shards(make_mesh((1, 8, 1))) == 8
    fixed = "algorithm.rows_per_device=1"
    message = refused(config, "rollout.prompts_per_step=5", fixed)
    assert "rollout.prompts_per_step: 5 prompts x rollout.group_size 4 = 20 samples" in message
    assert "set it to a multiple of 2, or set algo" in message
    assert "or set algorithm.max_tokens_per_device instead of algorithm.rows_per_device, for any number" in message
    message = refused(config, "algorithm.mini_batch_prompts=1", fixed)
    assert "algorithm.mini_batch_prompts: 1 prompts" in message and "set it to a multiple of 2, or" in message


def test_fixed_rows_that_do_not_divide_the_samples_of_a_device(config: Path) -> None:
    message = refused(config, "rollout.prompts_per_step=12", "algorithm.rows_per_device=4")
    assert "algorithm.rows_per_device: 4 does not divide the 6 samples of an optimizer step on each device" in message
    assert "(12 prompts x rollout.group_size 4 over 8 devices); set it to 2, which does, or set algo" in message
    assert "set it to 2, which does, or set algo" in refused(config, "algorithm.dynamic_microbatch=false")


@pytest.mark.parametrize(
    ("rows", "new_tokens", "length"),
    [
        ("algorithm.dynamic_microbatch=true", 14500, "16,384"),
        ("reward.model={judge} score.reward.max_tokens_per_device=15001", 100, "15,001"),
    ],
)
def test_rows_too_long_for_the_attention_kernel_of_a_chip(
    rows: str, new_tokens: int, length: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -e '.[tpu]'")
    for name in ("_simulated_slice", "_simulated_devices"):
        monkeypatch.setattr(devices, name, None)
    long = write_model(tmp_path / "long", max_position_embeddings=15_000)
    judge = write_reward_model(tmp_path / "judge", max_position_embeddings=15_000)
    overrides = (f"model.path={long}", f"rollout.max_new_tokens={new_tokens}", *rows.format(judge=judge).split())
    on_tpu = ("mesh.pretend=v4-8", "model.attention=kernel")
    result = here("train", "--config", config, "--dry-run", "--compile", *settings(*overrides, *on_tpu))
    assert result.exit_code == 2, result.stderr
    assert f"there is no attention kernel for tpu devices (TPU v4) and rows of {length} tokens" in result.stderr


def test_packed_micro_batches_take_any_number_of_samples(config: Path) -> None:
    odd = ("rollout.prompts_per_step=5", "rollout.group_size=3", "algorithm.mini_batch_prompts=1")
    resolved = load(str(config), odd, {})
    with prepare_run(resolved, resume="never") as launch:
        assert launch.resolved is resolved


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i} + 1 = ?", "answer": str(i + 1)}) + "\n" for i in range(5)))
    return path


def refused_data(config: Path, path: Path, *overrides: str) -> str:
    return refused(config, f"data.source={path}", "eval.every_steps=0", *overrides)


def test_data_of_which_every_row_is_too_long(config: Path, rows: Path) -> None:
    message = refused_data(config, rows, "data.max_prompt_length=3")
    assert "no prompt is left: 5 of 5 are longer than data.max_prompt_length = 3" in message


def remove_config(model: Path) -> None:
    (model / "config.json").unlink()


def use_another_family(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"model_type": "mamba"}))


def keep_only_a_pickle(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def truncate_weights(model: Path) -> None:
    size = (model / "model.safetensors").stat().st_size
    os.truncate(model / "model.safetensors", size - 100)


def forget_the_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    write_tokenizer(model, chat_template=None)


def remove_the_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def take_a_smaller_embedding(model: Path) -> None:
    write_model(model, vocab_size=20)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_config, "has no config.json, so it is not a Hugging Face model"),
        (use_another_family, "config.json: model_type='mamba' is not supported; supported: llama, mistral, qwen2"),
        (keep_only_a_pickle, "has weights only as pickles (pytorch_model.bin)"),
        (truncate_weights, "model.safetensors is truncated or not a safetensors file"),
        (forget_the_template, "the tokenizer has no chat template"),
        (remove_the_tokenizer, "there is no tokenizer.json"),
        (take_a_smaller_embedding, "the tokenizer has ids up to 21, but the model's vocab_size is 20"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_is_not_whole(config: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    model = write_model(tmp_path / "spoilt")
    spoil(model)
    assert message in refused(config, f"model.path={model}")


def test_a_format_reward_on_rows_that_evaluation_cannot_grade(config: Path) -> None:
    rows = config.parent / "questions.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n} + 1 = ?"}) + "\n" for n in range(20)))
    held_out = config.parent / "held_out.jsonl"
    held_out.write_text(rows.read_text())
    message = refused(
        config,
        f"data.source={rows}",
        f"data.eval_source={held_out}",
        "reward.functions=[arithmetic_format]",
    )
    assert "arithmetic compares with a reference number" in message


@pytest.mark.parametrize(
    ("count", "way_out"),
    [
        (8, "set algorithm.mini_batch_prompts=4"),
        (3, "set algorithm.mini_batch_prompts, after choosing a multiple of 2"),
    ],
)
def test_verls_mini_batch_size_is_refused_where_hosts_make_a_difference(count: int, way_out: str) -> None:
    theirs = load(None, [f"ppo_mini_batch_size={count}", "rollout.prompts_per_step=24"], {})
    check_mini_batch_alias(theirs, num_hosts=1)
    with pytest.raises(InputError, match=rf"ppo_mini_batch_size: {count} \(--set\) .* of the 2 hosts; .*{way_out}"):
        check_mini_batch_alias(theirs, num_hosts=2)
    ours = load(None, [f"algorithm.mini_batch_prompts={count}", "rollout.prompts_per_step=24"], {})
    check_mini_batch_alias(ours, num_hosts=2)


def test_a_later_layer_in_our_name_replaces_verls() -> None:
    environment = {"GRPO__ALGORITHM__MINI_BATCH_PROMPTS": "4"}
    both = load(None, ["ppo_mini_batch_size=8"], environment)
    check_mini_batch_alias(both, num_hosts=2)
    assert load(None, [], {"PPO_MINI_BATCH_SIZE": "8"}).aliases == {
        "algorithm.mini_batch_prompts": "ppo_mini_batch_size"
    }
