"""Tests that unusable input of `grpo train` gives one error with exit code 2, and changes nothing on disk."""

import json
from pathlib import Path

import pytest

from app.mesh.placement import num_local_row_shards
from app.training.setup import check_mini_batch_alias, prepare_run
from settings import load
from settings.errors import InputError
from tests.program import digest_of, here, settings
from tests.tiny import make_mesh
from tests.tiny_directory import write_model, write_reward_model


def refused(config: Path, *overrides: str, options: tuple[str | Path, ...] = ()) -> str:
    """Returns the error of `grpo train`, after checking that nothing else happened."""
    before = digest_of(config.parent)
    folders = {path for path in config.parent.rglob("*") if path.is_dir()}
    result = here("train", "--config", config, *options, *settings(*overrides))
    assert result.exit_code == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 2, "a settings check may find two things wrong"
    assert digest_of(config.parent) == before
    assert {path for path in config.parent.rglob("*") if path.is_dir()} == folders
    return result.stderr


FIXED = "algorithm.rows_per_device=1"
PROMPTS = "set it to a multiple of 2, or set algorithm.max_tokens_per_device instead of algorithm.rows_per_device"
ROUNDED_TWICE = ("rollout.weights=int8", "model.lora.rank=2", "model.lora.quantize_base=nf4")
ROWS = "4 does not divide the 6 samples of an optimizer step on each device (12 prompts x rollout.group_size 4 over"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.max_prompt_length=200",), "200 + 4 = 204 tokens, but the context of"),
        (("checkpoint.best_metric=eval/acuracy",), "or null to keep no best checkpoint; did you mean eval/accuracy?"),
        (("model.attention=kernel",), "there is no attention kernel for cpu devices (cpu)"),
        (("mesh.shape='3,1,1'", "model.path=gone"), "mesh.shape: '3,1,1' needs 3 devices, but there are 8"),
        (("model.lora.rank=33",), "model.lora.rank: 33 is more than the model's width 32"),
        (ROUNDED_TWICE, "rollout.weights: int8 quantizes weights for generation, but model.lora.quantize_base: nf4"),
        (("rollout.prompts_per_step=5", FIXED), "rollout.prompts_per_step: 5 prompts x rollout.group_size 4 = 20"),
        (("rollout.prompts_per_step=5", FIXED), PROMPTS),
        (("algorithm.mini_batch_prompts=1", FIXED, "model.path=gone"), "algorithm.mini_batch_prompts: 1 prompts"),
        (("rollout.prompts_per_step=12", "algorithm.rows_per_device=4"), ROWS),
        (
            ("data.curriculum=pass_rate", "rollout.prompts_per_step=41"),
            "41, must differ, but data.source has only 40",
        ),
        (("algorithm.dynamic_microbatch=false",), "set it to 2, or set algo"),
    ],
)
def test_train_refuses_settings_that_do_not_fit_the_model_data_or_devices(
    config: Path, overrides: tuple[str, ...], message: str
) -> None:
    assert message in refused(config, *overrides)


@pytest.mark.usefixtures("real_devices_again")
@pytest.mark.parametrize(("new_tokens", "length"), [(14500, "16,384"), (100, "15,001")])
def test_rows_too_long_for_the_attention_kernel_are_refused(new_tokens, length, config, tmp_path):
    """Checks the rows of an update and, if those are short enough, the rows of a reward model."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -e '.[tpu]'")
    long = write_model(tmp_path / "long", max_position_embeddings=15_000)
    judge = write_reward_model(tmp_path / "judge", max_position_embeddings=15_000)
    rewarding = (f"reward.model={judge}", "score.reward.max_tokens_per_device=15001")
    chosen = ("mesh.pretend=v4-8", "model.attention=kernel", f"model.path={long}", *rewarding)
    lengths = settings(*chosen, f"rollout.max_new_tokens={new_tokens}")
    result = here("train", "--config", config, "--dry-run", "--compile", *lengths)
    assert result.exit_code == 2, result.stderr
    assert f"there is no attention kernel for tpu devices (TPU v4) and rows of {length} tokens" in result.stderr


def test_packed_micro_batches_accept_any_number_of_samples(config: Path) -> None:
    assert num_local_row_shards(make_mesh((1, 8, 1))) == 8
    odd = ("rollout.prompts_per_step=5", "rollout.group_size=3", "algorithm.mini_batch_prompts=1")
    resolved = load(str(config), odd, {})
    with prepare_run(resolved, resume="never") as launch:
        assert launch.resolved == resolved


def write_rows(path: Path, *, count: int, **fields: str) -> Path:
    rows = ({"question": f"{i} + 1 = ?", **{k: v.format(i + 1) for k, v in fields.items()}} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_data_without_usable_prompts_or_answers_is_refused(config: Path) -> None:
    rows = write_rows(config.parent / "rows.jsonl", count=5, answer="{}")
    message = refused(config, f"data.source={rows}", "eval.every_steps=0", "data.max_prompt_length=3")
    assert "data.max_prompt_length = 3 is too short for every prompt" in message
    questions, held_out = (write_rows(config.parent / f"{name}.jsonl", count=20) for name in ("questions", "held_out"))
    data = (f"data.source={questions}", f"data.eval_source={held_out}", "reward.functions=[arithmetic_format]")
    assert "arithmetic compares with a reference number" in refused(config, *data)


@pytest.mark.parametrize(
    ("count", "way_out"),
    [
        (8, "set algorithm.mini_batch_prompts=4"),
        (3, "choose a multiple of 2, and set algorithm.mini_batch_prompts to it divided by 2"),
    ],
)
def test_mini_batch_size_of_verl_is_refused_on_several_hosts(count: int, way_out: str) -> None:
    theirs = load(None, [f"ppo_mini_batch_size={count}", "rollout.prompts_per_step=24"], {})
    check_mini_batch_alias(theirs, num_hosts=1)
    with pytest.raises(
        InputError, match=rf"ppo_mini_batch_size: {count} \(--set\) .* all 2 hosts in verl, .*{way_out}"
    ):
        check_mini_batch_alias(theirs, num_hosts=2)
    # A later configuration layer with the setting's own name replaces the name from verl.
    ours = load(None, [f"ppo_mini_batch_size={count}"], {"GRPO__ALGORITHM__MINI_BATCH_PROMPTS": "4"})
    check_mini_batch_alias(ours, num_hosts=2)
