"""Writes `tests/golden/trl_numbers.json`, the results of TRL's trainers for a few small tensors.

pip install trl
python -m scripts.make_trl_numbers
"""

import datetime
import importlib
import importlib.metadata
import json
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

PATH = Path(__file__).parents[1] / "tests" / "golden" / "trl_numbers.json"
SEED = 0
ROWS, TOKENS, VOCAB, LONGEST = 4, 6, 5, 8
LENGTHS = (6, 2, 5, 3)

CASES: tuple[dict[str, Any], ...] = (
    {"loss_type": "grpo", "old": False},
    {"loss_type": "grpo"},
    {"loss_type": "grpo", "beta": 0.04, "epsilon_high": 0.28},
    {"loss_type": "grpo", "delta": 1.5, "beta": 0.04},
    {"loss_type": "dr_grpo", "old": False},
    {"loss_type": "dr_grpo", "beta": 0.04},
    {"loss_type": "dapo", "old": False, "beta": 0.04},
    {"loss_type": "dapo", "epsilon_high": 0.28},
    {"loss_type": "dapo", "delta": 1.5},
    {"loss_type": "dapo", "entropy_coef": 0.1},
    {"loss_type": "luspo", "beta": 0.04},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "old": False, "beta": 0.04},
    {"loss_type": "luspo", "importance_sampling_level": "sequence", "delta": 1.5},
    {"loss_type": "cispo", "old": False},
    {"loss_type": "cispo", "epsilon_high": 1.2},
    {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.04},
)
"""Settings of GRPOTrainer; for CISPO, `epsilon_high` is the bound itself.

`old` selects an update that is not the first of its rollout and therefore has `old` logprobs.
"""
CORRECTION_CASES: tuple[dict[str, Any], ...] = (
    {"mode": "token_truncate", "loss_type": "grpo"},
    {"mode": "token_mask", "loss_type": "dapo", "beta": 0.04},
    {"mode": "sequence_truncate", "loss_type": "dr_grpo", "delta": 1.5},
    {"mode": "sequence_mask", "loss_type": "grpo", "beta": 0.04},
    {"mode": "sequence_mask", "loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"mode": "token_mask", "loss_type": "cispo", "epsilon_high": 1.2},
)
"""Settings of GRPOTrainer for samples of another engine; `mode` is `vllm_importance_sampling_mode`."""
CORRECTION_BOUNDS = (0.75, 1.2)
"""The bounds of masked weights; truncation uses only the upper one."""
DECOUPLED_CASES: tuple[dict[str, Any], ...] = (
    {
        "group_size": 4,
        "weights": [1.0, 0.25],
        "rewards": [[1.0, -120.0], [0.0, -100.0], [1.0, -60.0], [0.0, -80.0]],
    },
    {
        "group_size": 2,
        "weights": [2.0, -0.5, 1.0],
        "rewards": [[3.0, None, 7.0], [1.0, 0.5, 7.0], [None, 2.0, -1.0], [None, -2.0, 1.0]],
    },
    {
        "group_size": 4,
        "weights": [0.7, 1.0, 1.0],
        "rewards": [[0.5, 10.0, None], [2.0, 10.0, 40.0], [None, 10.0, 10.0], [-1.0, 10.0, 25.0]],
    },
)
"""Weights of reward functions and their rewards for each sample, for `normalize_then_sum` of GRPOTrainer.

None means that the function abstained.
"""
DEFAULTS = {
    "old": True,
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "delta": None,
    "entropy_coef": 0.0,
    "importance_sampling_level": "token",
}


def make_inputs(seed: int) -> dict[str, Any]:
    """Returns lists of numbers: logits, random tokens, and logprobs near to and far from the current ones."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.5, (ROWS, TOKENS, VOCAB)).astype(np.float32)
    completion_ids = rng.integers(0, VOCAB, (ROWS, TOKENS))
    mask = np.arange(TOKENS) < np.asarray(LENGTHS)[:, None]
    mask[0, 2] = mask[2, 1] = False  # these tokens were written by a tool
    log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_softmax, completion_ids[..., None], -1)[..., 0]
    inputs = {
        "logits": logits,
        "completion_ids": completion_ids,
        "mask": mask,
        "advantages": np.asarray([1.2, -0.7, 0.4, -0.5], np.float32),
        "old_logprobs": chosen + rng.normal(0, 0.6, chosen.shape).astype(np.float32),
        "reference_logprobs": chosen + rng.normal(0, 0.6, chosen.shape).astype(np.float32),
        "rewards": np.asarray([1.0, 0.0, 0.25, 1.0], np.float32),
    }
    inputs["behavior_logprobs"] = inputs["old_logprobs"] + rng.normal(0, 0.4, chosen.shape).astype(np.float32)
    return {name: value.tolist() for name, value in inputs.items()}


def grpo_numbers(case: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns loss, gradient with respect to the logits, and metrics of `GRPOTrainer._compute_loss`."""
    import torch

    settings = DEFAULTS | case
    mask = torch.tensor(inputs["mask"]).int()
    trainer = _stand_in(settings)
    batch = _batch(inputs) | {
        "advantages": torch.tensor(inputs["advantages"]),
        "ref_per_token_logps": torch.tensor(inputs["reference_logprobs"]),
        "num_items_in_batch": mask.sum(),
    }
    if settings["old"]:
        batch["old_per_token_logps"] = torch.tensor(inputs["old_logprobs"])
    model = _Table(inputs["logits"])
    loss = _trl("grpo").GRPOTrainer._compute_loss(trainer, model, batch)
    loss.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    names = {"kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean"} & metrics.keys()
    # With one ratio per sample, TRL counts clipped samples instead of tokens.
    if settings["importance_sampling_level"] == "sequence":
        names &= {"kl", "entropy"}
    return {
        "settings": case,
        "loss": loss.item(),
        "gradient": model.logits.grad.tolist(),
        "metrics": {name: metrics[name] for name in sorted(names)},
    }


def correction_numbers(case: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns GRPOTrainer's correction weights for samples of another engine, with the loss and the gradient."""
    import torch

    trl = _trl("grpo")
    settings = DEFAULTS | case
    trainer = _sampler_of_another_engine(settings, inputs)
    output = trl.GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": ""}] * ROWS)
    output["advantages"] = torch.tensor(inputs["advantages"])
    output["ref_per_token_logps"] = torch.tensor(inputs["reference_logprobs"])
    model = _Table(inputs["logits"])
    loss_trainer = _stand_in(settings)
    loss_trainer.use_vllm = loss_trainer.vllm_importance_sampling_correction = True
    loss = trl.GRPOTrainer._compute_loss(loss_trainer, model, output)
    loss.backward()
    return {
        "settings": case,
        "weights": output["importance_sampling_ratio"].expand(ROWS, TOKENS).tolist(),
        "loss": loss.item(),
        "gradient": model.logits.grad.tolist(),
    }


def _sampler_of_another_engine(settings: dict[str, Any], inputs: dict[str, Any]) -> Any:
    """Returns a GRPOTrainer whose engine generated the completions, with a mask like that of tool calls."""
    import torch

    def rows(name: str) -> list[list[Any]]:
        return [row[:length] for row, length in zip(inputs[name], LENGTHS, strict=True)]

    trainer: Any = object.__new__(_trl("grpo").GRPOTrainer)
    trainer.__dict__ |= vars(_stand_in(settings | {"beta": 0.0}))
    trainer.args.gradient_accumulation_steps = trainer.num_iterations = 1
    trainer.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    trainer.environment_factories = trainer.environments = trainer.tools = None
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    trainer.vllm_importance_sampling_mode = settings["mode"]
    lowest, highest = CORRECTION_BOUNDS
    trainer.vllm_importance_sampling_clip_min = lowest if settings["mode"].endswith("mask") else None
    trainer.vllm_importance_sampling_clip_max = highest
    trainer.mask_truncated_completions, trainer.pad_to_multiple_of, trainer.log_multimodal = False, None, False
    trainer._tokenizer = SimpleNamespace(pad_token_id=0)
    trainer.num_generations, trainer.scale_rewards = ROWS, "group"
    trainer.multi_objective_aggregation = "sum_then_normalize"
    trainer.reward_func_names, trainer.reward_weights = ["reward"], torch.ones(1)
    trainer._logs = {"rewards": defaultdict(list), "extra": defaultdict(list)} | {
        name: [] for name in ("prompt", "completion", "advantages")
    }
    trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
    drawn = rows("completion_ids"), rows("mask"), [""] * ROWS, rows("behavior_logprobs")
    trainer._generate = lambda prompts: ([[1]] * ROWS, *drawn, {}, None, None)
    trainer._calculate_rewards = lambda *_: torch.tensor(inputs["rewards"])[:, None]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (torch.tensor(inputs["old_logprobs"]), None, None)
    return trainer


def decoupled_advantages(case: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the advantages of a GRPOTrainer that normalizes each reward before summing them."""
    import torch

    trainer = _sampler_of_another_engine(DEFAULTS | {"loss_type": "grpo", "mode": "token_truncate"}, inputs)
    trainer.multi_objective_aggregation, trainer.num_generations = "normalize_then_sum", case["group_size"]
    trainer.reward_func_names = [f"reward_{i}" for i in range(len(case["weights"]))]
    trainer.reward_funcs, trainer.reward_weights = trainer.reward_func_names, torch.tensor(case["weights"])
    rewards = torch.tensor([[float("nan") if x is None else x for x in row] for row in case["rewards"]])
    trainer._calculate_rewards = lambda *_: rewards
    output = _trl("grpo").GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": ""}] * ROWS)
    return {**case, "advantages": output["advantages"].tolist()}


def rloo_numbers(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns loss and gradient of `RLOOTrainer._compute_loss` at its first update."""
    import torch

    model, mask = _Table(inputs["logits"]), torch.tensor(inputs["mask"]).int()
    logprobs, _, _ = _logprobs(model, torch.tensor(inputs["completion_ids"]))
    batch = _batch(inputs) | {
        "advantages": torch.tensor(inputs["advantages"]),
        "old_logps": (logprobs.detach() * mask).sum(1),
    }
    loss = _trl("rloo").RLOOTrainer._compute_loss(_stand_in(DEFAULTS | {"loss_type": ""}), model, batch)
    loss.backward()
    return {"loss": loss.item(), "gradient": model.logits.grad.tolist()}


def rloo_advantages(inputs: dict[str, Any], *, beta: float) -> dict[str, Any]:
    """Returns the advantages of RLOOTrainer for four samples of one prompt, with a KL penalty in their rewards."""
    import torch

    trl = _trl("rloo")
    trainer: Any = object.__new__(trl.RLOOTrainer)
    completions = [ids[:length] for ids, length in zip(inputs["completion_ids"], LENGTHS, strict=True)]
    policy, reference = torch.tensor(inputs["old_logprobs"]), torch.tensor(inputs["reference_logprobs"])
    trainer.__dict__ |= vars(_stand_in(DEFAULTS | {"beta": beta, "loss_type": ""}))
    trainer.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    trainer.ref_model = SimpleNamespace()
    trainer.num_generations, trainer.normalize_advantages, trainer.reward_clip_range = ROWS, False, None
    trainer.mask_truncated_completions, trainer.pad_to_multiple_of = False, None
    trainer._tokenizer = SimpleNamespace(pad_token_id=0)
    trainer.reward_func_names, trainer.reward_weights = ["reward"], torch.ones(1)
    trainer._logs = {"rewards": defaultdict(list), "extra": defaultdict(list)} | {
        name: [] for name in ("prompt", "completion", "advantages")
    }
    trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
    trainer._generate = lambda prompts: ([[1]] * ROWS, completions, [""] * ROWS)
    trainer._calculate_rewards = lambda *_: torch.tensor(inputs["rewards"])[:, None]
    trainer._get_per_token_logps_and_entropies = lambda model, *_, **__: (
        policy if model is trainer.model else reference,
        None,
        None,
    )
    output = trainer._generate_and_score_completions([{"prompt": ""}] * ROWS)
    return {"beta": beta, "advantages": output["advantages"].tolist()}


def _trl(trainer: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"trl.trainer.{trainer}_trainer")


def _batch(inputs: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {
        "prompt_ids": torch.zeros((ROWS, 1), dtype=torch.long),
        "prompt_mask": torch.ones((ROWS, 1), dtype=torch.int),
        "completion_ids": torch.tensor(inputs["completion_ids"]),
        "completion_mask": torch.tensor(inputs["mask"]).int(),
    }


class _Table:
    """A model whose parameters are its logits."""

    training = True

    def __init__(self, logits: Any):
        import torch

        self.logits: Any = torch.tensor(logits, requires_grad=True)


def _logprobs(model: _Table, completion_ids: Any) -> tuple[Any, Any, None]:
    import torch

    log_softmax = torch.log_softmax(model.logits, -1)
    chosen = torch.gather(log_softmax, -1, completion_ids[..., None])[..., 0]
    return chosen, -(log_softmax.exp() * log_softmax).sum(-1), None


def _stand_in(settings: dict[str, Any]) -> Any:
    """Returns an object with the attributes that the trainers' loss reads: settings, accelerator and forward pass."""
    import torch

    accelerator = SimpleNamespace(
        num_processes=1,
        process_index=0,
        device=torch.device("cpu"),
        sync_gradients=True,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    return SimpleNamespace(
        accelerator=accelerator,
        args=SimpleNamespace(
            delta=settings["delta"],
            use_bias_correction_kl=False,
            steps_per_generation=1,
            per_device_train_batch_size=ROWS,
            gradient_checkpointing_kwargs=None,
        ),
        model=SimpleNamespace(training=True),
        loss_type=settings["loss_type"],
        beta=settings["beta"],
        epsilon_low=settings["epsilon_low"],
        epsilon_high=settings["epsilon_high"],
        entropy_coef=settings["entropy_coef"],
        _entropy_bonus_enabled=settings["entropy_coef"] > 0,
        use_adaptive_entropy=False,
        max_completion_length=LONGEST,
        importance_sampling_level=settings["importance_sampling_level"],
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda model, ids, *_, **__: _logprobs(model, ids[:, 1:]),
    )


def numbers(seed: int) -> dict[str, Any]:
    """Returns all results for the inputs of this seed."""
    inputs = make_inputs(seed)
    return {
        "inputs": inputs,
        "grpo": [grpo_numbers(case, inputs) for case in CASES],
        "corrections": [correction_numbers(case, inputs) for case in CORRECTION_CASES],
        "decoupled_advantages": [decoupled_advantages(case, inputs) for case in DECOUPLED_CASES],
        "rloo": rloo_numbers(inputs),
        "rloo_advantages": [rloo_advantages(inputs, beta=beta) for beta in (0.0, 0.05)],
    }


def main() -> None:
    provenance = {
        "script": "python -m scripts.make_trl_numbers",
        "trl": importlib.metadata.version("trl"),
        "torch": importlib.metadata.version("torch"),
        "date": datetime.date.today().isoformat(),
        "seed": SEED,
    }
    PATH.write_text(json.dumps({"provenance": provenance, **numbers(SEED)}) + "\n")


if __name__ == "__main__":
    main()
