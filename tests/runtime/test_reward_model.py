"""Tests of a reward model in a run and in `grpo score --role reward`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from app.model.io.families import FAMILIES
from app.model.io.hf_weights import load_weights
from app.model.io.model_files import open_model
from app.model.segment_layout import single_segment_layout
from app.prompts.reward_model_encoder import ConversationEncoder
from app.prompts.tokenizer import load_fast_tokenizer
from app.records.jsonl import read_jsonl
from app.records.sample import Sample
from app.runtime.reward_model import RewardModel, RewardModelSpec, read_reward_model_spec
from settings import Settings
from settings.errors import InputError
from settings.schema.algorithm import MicroBatchSettings, ScoreSettings
from settings.schema.model import ModelSettings
from settings.schema.reward import RewardSettings
from tests.model.test_parity import SIZES, SWITCHES, import_reference
from tests.program import here, metrics_of, settings, train_here
from tests.tiny import make_mesh, make_sample
from tests.tiny_directory import write_reward_model, write_tokenizer
from tests.training.test_trainer import samples_of

QUIET = ("eval.every_steps=0", "run.steps=2")
QUESTIONS = ("1+2=?", "30-4=?", "5=?")
ANSWERS = ("3", "26", "", "123456789", "5+5", "-1", "#")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("judge") / "model")


def settings_of(model: Path, **micro_batches: Any) -> Settings:
    strategy = micro_batches.pop("strategy", None)
    own = MicroBatchSettings(**(micro_batches or {"max_tokens_per_device": 64}))
    return Settings(reward=RewardSettings(model=str(model)), score=ScoreSettings(strategy=strategy, reward=own))


def loaded(model: Path, **micro_batches: Any) -> RewardModel:
    chosen = settings_of(model, **micro_batches)
    read = read_reward_model_spec(chosen)
    assert read is not None
    return RewardModel.load(chosen, read, make_mesh())


def dialogues() -> list[Sample]:
    samples = []
    for i, answer in enumerate(ANSWERS):
        sample = make_sample([1, 2], group_id=i % len(QUESTIONS), sample_index=i)
        object.__setattr__(sample.prompt, "source", QUESTIONS[i % len(QUESTIONS)])
        object.__setattr__(sample, "completion", answer)
        samples.append(sample)
    return samples


def values_of(model: RewardModel, samples: list[Sample]) -> np.ndarray:
    return np.asarray([outcome.value for outcome in model.score(samples)[0]], float)


def by_hand(read: RewardModelSpec, samples: list[Sample]) -> np.ndarray:
    """Computes <hidden state at the last token, score.weight>, with each conversation in its own padded row."""
    texts = [read.conversations.encode(sample.prompt, sample.completion) for sample in samples]
    longest = max(map(len, texts))
    ids = jnp.asarray([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = jnp.arange(longest) < jnp.asarray([[len(text)] for text in texts])
    params = load_weights(read.definition, read.files.weights, make_mesh())

    @jax.jit
    def hidden(params: Any) -> Any:
        return read.definition.bind(params).hidden(ids, single_segment_layout(mask), dtype=jnp.dtype("float32"))

    last = np.asarray(hidden(params))[np.arange(len(texts)), [len(text) - 1 for text in texts]]
    return last @ read.files.weights.read("score.weight")[0]


def test_the_score_is_read_at_the_last_token_however_conversations_share_rows(judge: Path) -> None:
    samples = dialogues()
    packed = loaded(judge)
    expected = by_hand(packed.spec, samples)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(values_of(packed, samples), expected, atol=1e-5)
    for strategy in ("loop", "scan"):
        np.testing.assert_allclose(
            values_of(loaded(judge, rows_per_device=3, strategy=strategy), samples), expected, atol=1e-5
        )
    assert packed.score([])[0] == []


def test_weights_in_the_compute_type_score_as_those_in_float32(judge: Path) -> None:
    chosen = settings_of(judge).model_copy(update={"model": ModelSettings(dtype="bfloat16")})
    read = read_reward_model_spec(chosen)
    assert read is not None
    ours = RewardModel.load(chosen, read, make_mesh())
    assert {leaf.dtype for leaf in jax.tree.leaves(ours.params)} == {jnp.dtype("bfloat16")}
    in_float32 = replace(ours, params=load_weights(read.definition, read.files.weights, make_mesh()))
    np.testing.assert_array_equal(values_of(ours, dialogues()), values_of(in_float32, dialogues()))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_scores_as_transformers_does(model_type: str, tmp_path: Path) -> None:
    torch, transformers = import_reference()
    config = transformers.AutoConfig.for_model(
        model_type, **SIZES | SWITCHES.get(model_type, {}) | {"num_labels": 1, "pad_token_id": 0}
    )
    model = transformers.AutoModelForSequenceClassification.from_config(config, experts_implementation="eager").eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            center = 1.0 if "norm" in name and not model_type.startswith("gemma") else 0.0
            weight.copy_(torch.from_numpy(rng.normal(center, 0.3, tuple(weight.shape)).astype(np.float32)))
    model.save_pretrained(tmp_path)
    # Id 0, which the configuration calls padding, ends every chat: the score is read before it.
    template = "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}<|end|>"
    write_tokenizer(tmp_path, chat_template=template)
    ours, samples = loaded(tmp_path), dialogues()
    vocab = load_fast_tokenizer(ours.spec.files).get_vocab()
    texts = [
        [vocab[token] for token in ("<|user|>", *q, "<|user|>", *s.completion, "<|end|>")]
        for s in samples
        for q in [str(s.prompt.source)]
    ]
    with torch.no_grad():
        expected = [float(model(torch.tensor([text])).logits[0, 0]) for text in texts]
        longest = max(map(len, texts))
        batch = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        together = model(batch, attention_mask=(torch.arange(longest) < torch.tensor([[len(t)] for t in texts])).int())
    np.testing.assert_allclose(values_of(ours, samples), expected, atol=1e-4)
    np.testing.assert_allclose(together.logits[:, 0], expected, atol=1e-4)


def test_the_policy_is_no_classifier(judge: Path) -> None:
    result = here("train", *settings(f"model.path={judge}"))
    assert result.exit_code == 2
    assert "architectures=['LlamaForSequenceClassification'] is not supported" in result.stderr
    assert "supported: LlamaForCausalLM" in result.stderr


def test_a_run_learns_from_the_model_beside_the_functions(config: Path, judge: Path) -> None:
    chosen = (f"reward.model={judge}", "reward.model_weight=0.25", "run.steps=2", "eval.every_steps=0")
    result = train_here(config, *chosen)
    assert result.exit_code == 0, result.stderr
    run = config.parent / "runs" / "tiny"
    model = loaded(judge)
    lines = metrics_of(run)
    for line in lines:
        samples = samples_of(run, line["step"])
        scores = [(s.rewards or {})["model"] for s in samples]
        np.testing.assert_allclose(scores, values_of(model, samples), atol=1e-4)
        assert line["reward/model/mean"] == pytest.approx(np.mean(scores))
        functions = line["reward/arithmetic/mean"] + 0.5 * line["reward/arithmetic_format/mean"]
        assert line["reward/mean"] == pytest.approx(functions + 0.25 * line["reward/model/mean"])
        assert line["reward/model/error_count"] == 0
        assert 0 < line["time/score_reward_s"] <= line["time/reward_s"]
        assert line["score/reward/fill"] > 0
    assert lines[1]["perf/score_reward_compilations"] == 0


def test_score_adds_the_score_of_every_sample_to_a_file(sampled: Path, judge: Path, tmp_path: Path) -> None:
    chosen = settings(f"reward.model={judge}", "reward.functions=[{name: arithmetic, weight: 0}]")
    result = here("score", *chosen, "--role", "reward", "--input", sampled, "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.stderr
    records = [record for _, record in read_jsonl(tmp_path / "out.jsonl")]
    assert all(record["reward"] == record["rewards"]["model"] for record in records)
    assert len({record["reward"] for record in records}) > 3
    assert "reward/model/mean" in result.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "reward.model: config.json: architectures=['LlamaForCausalLM']"),
        ({"num_labels": 3}, "has 3 labels"),
        ({"max_position_embeddings": 19}, "16 + 4 = 20 tokens, but the context"),
    ],
)
def test_a_checkpoint_that_gives_no_score_is_refused(
    config: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model = write_reward_model(tmp_path / "judge", **changes)
    result = train_here(config, f"reward.model={model}")
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert not (config.parent / "runs").exists()


def test_a_checkpoint_without_its_head_is_refused_by_the_name_of_the_tensor(judge: Path, tmp_path: Path) -> None:
    model = write_reward_model(tmp_path / "judge")
    tensors = load_file(model / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(InputError, match=r"reward.model: missing tensors: 1, first 'score.weight'"):
        read_reward_model_spec(settings_of(model))
    with pytest.raises(InputError, match=r"reward.model: .*neither an existing directory"):
        read_reward_model_spec(settings_of(tmp_path / "no such"))


def test_a_score_that_is_no_number_stops_the_run_with_the_sample_named(config: Path, tmp_path: Path) -> None:
    model = write_reward_model(tmp_path / "judge")
    tensors = load_file(model / "model.safetensors")
    tensors["score.weight"][:] = np.nan
    save_file(tensors, model / "model.safetensors")
    result = train_here(config, f"reward.model={model}", *QUIET)
    assert result.exit_code == 1
    assert re.search(r"reward.model: model: value: the reward model's score is nan \(sample \S+/s0\)", result.stderr)


def test_a_conversation_over_the_context_fails_alone(judge: Path) -> None:
    samples = dialogues()
    expected = values_of(loaded(judge), samples)
    object.__setattr__(samples[2], "completion", "1" * 63)
    outcomes, _ = loaded(judge).score(samples)
    failure = outcomes[2].failure
    assert failure is not None and failure.kind == "too long"
    assert "score.reward.max_tokens_per_device holds only 63" in failure.text
    kept = [i for i in range(len(samples)) if i != 2]
    np.testing.assert_allclose(np.asarray([outcomes[i].value for i in kept], float), expected[kept], atol=1e-5)


def test_a_reward_model_may_have_its_own_vocabulary_and_no_template(judge: Path, tmp_path: Path) -> None:
    model = write_reward_model(tmp_path / "judge")
    (model / "chat_template.jinja").unlink()
    write_tokenizer(model, chat_template=None)
    conversations = ConversationEncoder(open_model(str(model)), system_prompt=None)
    vocab = load_fast_tokenizer(open_model(str(model))).get_vocab()
    sample = dialogues()[0]
    spelled = [vocab[c] for c in "1+2=?3"]
    assert conversations.encode(sample.prompt, sample.completion).tolist() == spelled
    object.__setattr__(sample.prompt, "source", [{"role": "user", "content": "1+2=?"}])
    with pytest.raises(InputError, match="no chat template"):
        conversations.encode(sample.prompt, sample.completion)


def test_a_function_may_not_have_the_name_of_the_model(config: Path, judge: Path) -> None:
    functions = "reward.functions=[{name: model, function: rewards.py:model}]"
    result = train_here(config, f"reward.model={judge}", functions)
    assert result.exit_code == 2
    assert "`model` is reserved for the score of reward.model" in result.stderr
