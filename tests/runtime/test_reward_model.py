"""Tests a reward model in a run and in `grpo score --role reward`."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from app.model.io.model_files import open_model
from app.prompts.reward_model_encoder import ConversationEncoder
from app.prompts.tokenizer import load_fast_tokenizer
from app.records.jsonl import read_jsonl
from app.records.sample import Sample
from app.records.sample_json import sample_from_record
from app.runtime.inputs import read_checked_reward_model
from app.runtime.reward_model import RewardModel, read_reward_model_spec
from settings import Settings, load
from settings.errors import InputError
from settings.schema.algorithm import MicroBatchSettings, ScoreSettings
from settings.schema.data import DataSettings
from settings.schema.reward import RewardSettings
from tests.model.reference import SIZES, SWITCHES, import_reference
from tests.program import here, metrics_of, records_of, settings, succeeded, train_here
from tests.tiny import make_mesh, make_sample
from tests.tiny_directory import write_reward_model, write_tokenizer

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


@pytest.mark.parametrize("model_type", ["qwen2", "gemma3_text"])
def test_reward_model_scores_equal_transformers(model_type: str, tmp_path: Path) -> None:
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
    if model_type == "qwen2":
        for strategy in ("loop", "scan"):
            values = values_of(loaded(tmp_path, rows_per_device=3, strategy=strategy), samples)
            np.testing.assert_allclose(values, expected, atol=1e-4)
        assert ours.score([])[0] == []
    np.testing.assert_allclose(together.logits[:, 0], expected, atol=1e-4)


def test_a_run_adds_the_reward_models_score_to_the_rewards(config: Path, judge: Path) -> None:
    chosen = (f"reward.model={judge}", "reward.model_weight=0.25", "run.steps=2", "eval.every_steps=0")
    succeeded(train_here(config, *chosen))
    run = config.parent / "runs" / "tiny"
    model = loaded(judge)
    lines = metrics_of(run)
    for line in lines:
        path = run / "rollouts" / f"step_{line['step']:06d}.jsonl"
        samples = [sample_from_record(record, where="") for _, record in read_jsonl(path)]
        scores = [(s.rewards or {})["model"] for s in samples]
        np.testing.assert_allclose(scores, values_of(model, samples), atol=1e-4)
        assert line["reward/model/mean"] == pytest.approx(np.mean(scores))
        functions = line["reward/arithmetic/mean"] + 0.5 * line["reward/arithmetic_format/mean"]
        assert line["reward/mean"] == pytest.approx(functions + 0.25 * line["reward/model/mean"])
        assert line["reward/model/error_count"] == 0
        assert 0 < line["time/score_reward_s"] <= line["time/reward_s"]
        assert line["score/reward/fill"] > 0
    assert lines[1]["perf/score_reward_compilations"] == 0


def test_grpo_score_writes_the_reward_models_score_of_every_sample(sampled: Path, judge: Path, tmp_path: Path) -> None:
    chosen = settings(f"reward.model={judge}", "reward.functions=[{name: arithmetic, weight: 0}]")
    result = succeeded(here("score", *chosen, "--role", "reward", "--input", sampled, "--out", tmp_path / "out.jsonl"))
    records = records_of(tmp_path / "out.jsonl")
    assert all(record["reward"] == record["rewards"]["model"] for record in records)
    assert len({record["reward"] for record in records}) > 3 and "reward/model/mean" in result.stdout


def with_head(model: Path, value: float | None) -> Path:
    """Sets all weights of the head to a value, or removes the head."""
    tensors = load_file(model / "model.safetensors")
    head = tensors.pop("score.weight")
    tensors |= {} if value is None else {"score.weight": np.full_like(head, value)}
    save_file(tensors, model / "model.safetensors")
    return model


def test_a_reward_model_checkpoint_that_gives_no_single_score_is_refused(tmp_path: Path) -> None:
    short = write_reward_model(tmp_path / "short", max_position_embeddings=19)
    for model, message in (
        (write_reward_model(tmp_path / "lm", architectures=["LlamaForCausalLM"]), "architectures=['LlamaForCausalLM']"),
        (write_reward_model(tmp_path / "labels", num_labels=3), "has 3 labels"),
        (short, "16 + 4 = 20 tokens, but the context of reward.model"),
        (with_head(write_reward_model(tmp_path / "headless"), None), "missing tensors: 1, first 'score.weight'"),
        (tmp_path / "no such", "neither an existing directory"),
    ):
        chosen = ("data.max_prompt_length=16", "rollout.max_new_tokens=4", f"reward.model={model}")
        with pytest.raises(InputError, match=re.escape(message)) as error:
            read_checked_reward_model(load(None, chosen, {}).settings)
        assert "reward.model" in str(error.value)


def test_a_non_finite_reward_model_score_is_a_failure_of_its_sample(tmp_path: Path) -> None:
    model = loaded(with_head(write_reward_model(tmp_path / "judge"), math.nan))
    failures = [outcome.failure for outcome in model.score(dialogues())[0]]
    assert [failure and failure.text for failure in failures] == ["the reward model's score is nan"] * len(ANSWERS)


def test_a_conversation_too_long_for_the_reward_model_fails_without_affecting_others(judge: Path) -> None:
    samples = dialogues()
    expected = values_of(loaded(judge), samples)
    object.__setattr__(samples[2], "completion", "1" * 63)
    outcomes, _ = loaded(judge).score(samples)
    failure = outcomes[2].failure
    assert failure is not None and failure.kind == "too long"
    assert "score.reward.max_tokens_per_device holds only 63" in failure.text
    kept = [i for i in range(len(samples)) if i != 2]
    np.testing.assert_allclose(np.asarray([outcomes[i].value for i in kept], float), expected[kept], atol=1e-5)


def test_a_reward_model_uses_its_own_tokenizer_and_needs_a_template_only_for_chats(tmp_path: Path) -> None:
    model = write_reward_model(tmp_path / "judge")
    (model / "chat_template.jinja").unlink()
    write_tokenizer(model, chat_template=None)
    conversations = ConversationEncoder(open_model(str(model)), DataSettings())
    vocab = load_fast_tokenizer(open_model(str(model))).get_vocab()
    sample = dialogues()[0]
    spelled = [vocab[c] for c in "1+2=?3"]
    assert conversations.encode(sample.prompt, sample.completion).tolist() == spelled
    object.__setattr__(sample.prompt, "source", [{"role": "user", "content": "1+2=?"}])
    with pytest.raises(InputError, match="no chat template"):
        conversations.encode(sample.prompt, sample.completion)
