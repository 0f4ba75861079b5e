"""Tests the checks of models and data, and that a run keeps the commits of its hub models."""

import json
import logging
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import Result

from app.model.io.hf_weights import EMBEDDING, LM_HEAD, load_weights
from app.model.io.model_files import open_model
from app.preflight.inspect_mesh import read_config_only_spec
from app.prompts.tokenizer import load_tokenizer
from app.records.run_directory import RunDirectory
from app.runtime.inputs import encode_train_data, read_train_rows
from app.runtime.model_spec import (
    NetworkSpec,
    adapter_notes,
    read_critic_spec,
    read_model_spec,
    read_reference_spec,
)
from app.runtime.pinned_revisions import pin_revisions, record_commits
from app.runtime.reward_model import read_reward_model_spec, reward_model_notes
from app.training.inputs import read_training_inputs
from settings import InputError, Settings, load
from tests.local_hub import serve, use_hub
from tests.model.io import gguf_files
from tests.program import train_here
from tests.tiny import make_mesh
from tests.tiny_directory import write_model, write_reward_model, write_tokenizer

SHORT, LONG = "1 + 1?", "1 + 1? " * 50


def encode(folder: Path, *files: list[str]) -> list[str]:
    """Writes files with these prompts, and returns the uids of those that `encode_train_data` keeps of them all."""
    paths = []
    for number, prompts in enumerate(files):
        paths.append(str(folder / f"{number}.jsonl"))
        lines = [json.dumps({"prompt": prompt, "answer": "2"}) for prompt in prompts]
        Path(paths[-1]).write_text("\n".join(lines))
    settings = load(None, [f"data.source={json.dumps(paths)}", "data.max_prompt_length=64"], {}).settings
    tokenizer = load_tokenizer(open_model("builtin:tiny"))
    return [prompt.uid for prompt in encode_train_data(settings, read_train_rows(settings), tokenizer)[0]]


def test_a_data_source_whose_prompts_are_all_too_long_is_refused(tmp_path: Path) -> None:
    assert encode(tmp_path, [SHORT, LONG], [SHORT]) == ["0/0/0", "1/1/0"]
    with pytest.raises(InputError, match=r"data\.source: every prompt of .*1\.jsonl is longer than"):
        encode(tmp_path, [SHORT], [LONG])


def test_prompts_of_mostly_unknown_tokens_are_reported_by_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        encode(tmp_path, ["ö + 1"], ["1" * 40])
        assert not caplog.messages
        encode(tmp_path, ["ö" * 40], ["1"])
    (message,) = caplog.messages
    assert " % of the tokens of the prompts are unknown to the tokenizer of builtin:tiny" in message


def test_adapter_notes_say_which_weights_are_trained(tiny_model: Path) -> None:
    model = read_model_spec(Settings.model_validate({"model": {"path": str(tiny_model), "lora": {"rank": 2}}}))
    (alone,) = adapter_notes(model, has_critic=False)
    assert alone.startswith("model.lora: 1,856 weights are trained (rank 2, alpha 16, q_proj")
    assert alone.endswith(" weights of tiny are frozen")
    assert adapter_notes(model, has_critic=True) == (f"{alone}; the critic trains all its weights",)
    assert adapter_notes(model.without_adapters, has_critic=True) == ()


def critic_input(policy: Path, critic: Path) -> NetworkSpec:
    settings = load(None, [f"model.path={policy}", f"critic.path={critic}"], {}).settings
    return read_critic_spec(settings, read_model_spec(settings))


def test_every_network_uses_the_configured_attention_implementation(tiny_model: Path, tmp_path: Path) -> None:
    other, judge = write_model(tmp_path / "critic"), write_reward_model(tmp_path / "judge")
    chosen = [f"model.path={tiny_model}", "algorithm.name=ppo", f"reward.model={judge}", f"critic.path={other}"]
    chosen += ["data.max_prompt_length=16", "rollout.max_new_tokens=4", "model.attention=xla", "model.lora.rank=2"]
    settings = load(None, chosen, {}).settings
    policy, reward_model = read_model_spec(settings), read_reward_model_spec(settings)
    definitions = [policy.definition, policy.policy_definition, policy.reference_definition]
    definitions += [policy.decode_definition(jnp.dtype("float32")), read_critic_spec(settings, policy).definition]
    without_files = read_config_only_spec(settings)
    assert reward_model is not None and without_files.critic is not None and without_files.reward_model is not None
    definitions += [reward_model.definition, without_files.model.policy_definition]
    definitions += [without_files.critic.definition, without_files.reward_model.definition]
    assert [one.architecture.attention_implementation for one in definitions] == ["xla"] * 9


def change_tokenizer(model: Path, **changes: object) -> Path:
    path = model / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return model


def test_a_critic_needs_the_policys_token_ids_but_no_chat_template(tiny_model: Path, tmp_path: Path) -> None:
    critic = write_model(tmp_path / "critic")
    (critic / "chat_template.jinja").unlink()
    write_tokenizer(critic, eos_token=None, chat_template=None)
    assert critic_input(tiny_model, critic).files.path == critic
    # Trainers of classifiers save their tokenizers with such a truncation.
    cut = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
    assert critic_input(tiny_model, change_tokenizer(critic, truncation=cut)).files.path == critic


def test_a_critic_with_another_vocabulary_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    split = change_tokenizer(write_model(tmp_path / "split"), pre_tokenizer=None)
    with pytest.raises(InputError, match=r"critic\.path: the tokenizer of .* differs from that of model\.path"):
        critic_input(tiny_model, split)
    small = write_model(tmp_path / "small", vocab_size=20)
    with pytest.raises(InputError, match=r"critic\.path: .* has ids up to 21, but the model's vocab_size is 20"):
        critic_input(tiny_model, small)


def test_a_teacher_with_a_larger_vocabulary_is_cut_to_the_policys_tokens(tiny_model: Path, tmp_path: Path) -> None:
    tensors = gguf_files.random_checkpoint(biases=False, tied=False)
    path = gguf_files.write_gguf(tmp_path / "a.gguf", "llama", tensors, extra=[gguf_files.add_tiny_tokenizer])
    settings = load(None, [f"model.path={tiny_model}", f"reference.path={path}"], {}).settings
    teacher = read_reference_spec(settings, read_model_spec(settings))
    assert teacher.architecture.vocab_size == 24
    params = load_weights(teacher.definition, teacher.files.weights, make_mesh())
    for ours, name in (("embedding", EMBEDDING), ("output", LM_HEAD)):
        np.testing.assert_array_equal(params[ours], tensors[name][:24])


def test_a_note_names_a_reward_model_with_another_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    same = write_reward_model(tmp_path / "same")
    other = change_tokenizer(write_reward_model(tmp_path / "other"), pre_tokenizer=None)
    found = []
    for judge in (same, other):
        settings = load(None, [f"model.path={tiny_model}", f"reward.model={judge}"], {}).settings
        found += reward_model_notes(read_reward_model_spec(settings), read_model_spec(settings))
    (note,) = found
    assert note.startswith("reward.model: the tokenizer of other differs from that of tiny, so it reads completions")


ID = "owner/tiny"


def test_a_resumed_run_keeps_the_commit_of_its_hub_model(config, tiny_model, tmp_path, monkeypatch):
    def train(steps: int, path: str = ID) -> Result:
        return train_here(config, f"model.path={path}", "eval.every_steps=0", f"run.steps={steps}", resume="auto")

    record = config.parent / "runs" / "tiny" / "model.json"
    with serve() as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        first = hub.commit(ID, tiny_model)
        result = train(1)
        assert result.exit_code == 0, result.stderr
        hub.commit(ID, write_model(tmp_path / "moved", seed=1))
        assert open_model(ID).commit != first
        assert json.loads(record.read_text()) == {"path": ID, "commit": first}
        # Requesting another revision counts as a changed model.
        result = train(2, f"{ID}@main")
        assert result.exit_code == 2
        assert "error: --resume: model changed since this run was started" in result.stderr
        assert "(the old revision of a hub model, " in result.stderr
        again = pin_revisions(load(str(config), [f"model.path={ID}"], {}).settings, RunDirectory(record.parent))
        assert read_training_inputs(again).model_commits["model"] == first


def test_a_resumed_run_keeps_the_commits_of_critic_reward_model_and_reference(
    config, tiny_model, tmp_path, monkeypatch
):
    ids = {"model": "owner/policy", "critic": "owner/critic", "reward": "owner/judge", "reference": "owner/teacher"}
    chosen = [f"model.path={ids['model']}", f"critic.path={ids['critic']}", f"reward.model={ids['reward']}"]
    chosen += [f"reference.path={ids['reference']}", "reference.revision=main", "algorithm.beta=0.1"]
    with serve() as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "cache")
        judges = [write_reward_model(tmp_path / f"judge{seed}", seed=seed) for seed in (7, 8)]
        moved = write_model(tmp_path / "moved", seed=1)
        first = {section: hub.commit(ids[section], tiny_model) for section in ("model", "critic", "reference")}
        first["reward"] = hub.commit(ids["reward"], judges[0])
        settings = load(str(config), ["algorithm.name=ppo", *chosen], {}).settings
        run = RunDirectory(tmp_path)
        record_commits(run, settings, read_training_inputs(settings).model_commits)
        hub.commit(ids["model"], moved)
        hub.commit(ids["critic"], moved)
        hub.commit(ids["reference"], moved)
        hub.commit(ids["reward"], judges[1])
        assert read_training_inputs(pin_revisions(settings, run)).model_commits == first
        # A model whose revision is requested gets it; the others keep their commits.
        other = load(str(config), ["algorithm.name=ppo", *chosen], {"GRPO__CRITIC__PATH": "owner/critic@main"}).settings
        commits = read_training_inputs(pin_revisions(other, run)).model_commits
        assert commits["critic"] != first["critic"] and commits["reward"] == first["reward"]


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_record_of_hub_commits_is_refused(config: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(InputError, match=r"--resume: .*model\.json .*use another run\.name"):
        pin_revisions(load(str(config), [], {}).settings, RunDirectory(tmp_path))
