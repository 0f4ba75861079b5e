"""Tests derived values: they follow from other settings, only `model.dtype` from devices."""

from operator import attrgetter
from typing import Any, get_args

import pytest

from settings import load
from settings.checks.commands import check_for_train
from settings.checks.unused_settings import launch_notices
from settings.loading.algorithm_presets import ALGORITHM_PRESETS
from settings.loading.config_file import ConfigFile
from settings.loading.fields import FIELDS
from settings.schema.model import PROJECTIONS
from tests.settings.loading import load_text, over_defaults, rows_of, with_sets

UNEQUAL = "rollout.mode=exact; rollout.scheduler=adaptive; rollout.workers.fast.slots=12; rollout.workers.heavy.slots=8"
DERIVED: list[tuple[str, dict[str, Any]]] = [
    ("rollout.max_new_tokens=1024; data.max_prompt_length=16", {"rollout.max_length_total": 1024 + 128}),
    ("rollout.max_new_tokens=1024; data.max_prompt_length=512", {"rollout.max_length_total": 1024 + 512}),
    ("rollout.prompts_per_step=6", {"algorithm.mini_batch_prompts": 6, "mesh.shape": "auto"}),
    ("data.source=rows.jsonl", {"data.eval_source": None, "data.eval_split": "test"}),
    ("data.source=hf:a/b", {"data.eval_source": "hf:a/b"}),
    ("algorithm.beta=0.1; algorithm.kl_in=reward", {"algorithm.kl_estimator": "k1", "algorithm.kl_in_reward": True}),
    ("algorithm.name=rloo; algorithm.beta=0.1; algorithm.kl_in=loss", {"algorithm.kl_estimator": "k3"}),
    ("algorithm.name=rloo", {"algorithm.kl_in": None, "algorithm.kl_estimator": None}),  # a penalty of weight 0
    (UNEQUAL, {"rollout.rows_together": 4}),
    (f"{UNEQUAL}; rollout.mode=fast", {"rollout.rows_together": None}),
    (f"{UNEQUAL}; rollout.placement=global", {"rollout.rows_together": None}),
    (f"{UNEQUAL}; rollout.workers.heavy.count=0", {"rollout.rows_together": None}),
    ("score.reference.offload=true; algorithm.beta=0.1", {"offloads_reference": True}),
    ("score.reference.offload=true; algorithm.beta=0.1; model.lora.rank=8", {"offloads_reference": False}),
    (
        "score.reference.offload=true; algorithm.beta=0.1; model.lora.rank=8; reference.path=a/b",
        {"offloads_reference": True},
    ),
    ("algorithm.name=distill", {"algorithm.beta": 1.0, "scored_roles": ("policy", "reference"), "has_teacher": False}),
    ("algorithm.name=distill; algorithm.beta=0.3; reference.path=a/b", {"algorithm.beta": 0.3, "has_teacher": True}),
    ("reference.path=a/b; reference.revision=v1", {"reference.source": "a/b@v1", "has_teacher": False}),
    ("model.lora.targets=all", {"model.lora.projections": PROJECTIONS}),
    ("model.lora.targets=attention", {"model.lora.projections": PROJECTIONS[:4]}),
    ("model.lora.targets=[mlp, q_proj, mlp]", {"model.lora.projections": ("q_proj", *PROJECTIONS[4:])}),
    ("mesh.shape=1, -1, 1; rollout.mesh=dp=2, tp=4", {"mesh.shape": "1,-1,1", "rollout.mesh": "dp=2,tp=4"}),
    ("rollout.devices=[3, 1]", {"rollout.devices": (1, 3)}),
    ("run.steps=10", {"scored_roles": (), "num_policy_updates": 10}),
    ("run.steps=10; algorithm.epochs=2; algorithm.mini_batch_prompts=2", {"num_policy_updates": 80}),
    ("run.steps=10; algorithm.name=ppo; critic.warmup_steps=3; algorithm.epochs=2", {"num_policy_updates": 14}),
    ("algorithm.epochs=2", {"scored_roles": ("policy",)}),
    ("algorithm.beta=0.1", {"scored_roles": ("reference",)}),
    ("algorithm.beta=0.1; algorithm.kl_in=reward", {"scored_roles": ("policy", "reference")}),
    ("algorithm.name=ppo; algorithm.epochs=2", {"scored_roles": ("policy", "critic")}),
    ("algorithm.estimator=vtrace", {"scored_roles": ("policy", "critic")}),
    *(
        (f"algorithm.loss_aggregation={of_verl}", {"algorithm.loss_aggregation": ours})
        for of_verl, ours in (
            ("token-mean", "token-mean"),
            ("seq-mean-token-mean", "sequence-mean-token-mean"),
            ("seq-mean-token-sum", "sequence-mean-token-sum"),
            ("seq-mean-token-sum-norm", "constant-length"),
        )
    ),
]
"""Settings, and what follows from them."""


@pytest.mark.parametrize(("overrides", "expected"), DERIVED)
def test_derived_settings_follow_from_the_chosen_settings(overrides: str, expected: dict[str, Any]) -> None:
    resolved = over_defaults(*overrides.split("; "))
    assert {name: attrgetter(name)(resolved.settings) for name in expected} == expected


def test_a_run_is_named_after_its_config_and_seed() -> None:
    assert with_sets("run.seed=3").settings.run.name == "quickstart-seed3"
    file = ConfigFile("_my config!.yaml", "_my config!", b"run: {seed: 5}")
    assert load(file, [], {}).settings.run.name == "run_my-config--seed5"


PAPERS = rows_of("""
grpo | grpo token ppo 0.2 0.2 none token-mean loss k3
dr_grpo | dr_grpo token ppo 0.2 0.2 none constant-length loss k3
rloo | rloo token ppo 0.2 0.2 none sequence-mean-token-sum reward k1
maxrl | maxrl token ppo 0.2 0.2 none token-mean loss k3
reinforce_plus_plus | reinforce_plus_plus token ppo 0.2 0.2 none token-mean reward k1
gspo | grpo sequence ppo 0.0003 0.0004 none sequence-mean-token-mean loss k3
dapo | grpo token ppo 0.2 0.28 zero_variance token-mean loss k3
cispo | grpo token cispo 10.0 0.2 zero_variance token-mean loss k3
ppo | gae token ppo 0.2 0.2 none token-mean reward k1
distill | grpo token ppo 0.2 0.2 none token-mean advantage k1
""")
PARTS = ("estimator", "ratio_level", "clip", "clip_low", "clip_high", "filter", "loss_aggregation")
PARTS += ("kl_in", "kl_estimator")


@pytest.mark.parametrize(("name", "expected"), PAPERS)
def test_an_algorithm_sets_the_values_of_its_paper_and_each_can_be_overridden(name: str, expected: str) -> None:
    resolved = with_sets(f"algorithm.name={name}", "algorithm.beta=0.1")
    assert " ".join(str(getattr(resolved.settings.algorithm, part)) for part in PARTS) == expected
    assert {resolved.provenance[f"algorithm.{part}"] for part in PARTS} == {"derived"}
    chosen = {"filter": "zero_variance", "clip_high": 0.5, "loss_aggregation": "token-mean"}
    changed = with_sets(f"algorithm.name={name}", *(f"algorithm.{part}={value}" for part, value in chosen.items()))
    assert {part: getattr(changed.settings.algorithm, part) for part in chosen} == chosen
    assert {changed.provenance[f"algorithm.{part}"] for part in chosen} == {"set"}
    assert set(ALGORITHM_PRESETS) == set(get_args(FIELDS["algorithm.name"].annotation))


def test_launch_notice_lists_algorithm_changes_but_not_user_settings() -> None:
    dapo = "algorithm.name=dapo"
    expected = "dapo (Yu et al. 2025): clip_high 0.28 (grpo: 0.2), filter zero_variance (grpo: none)"
    assert with_sets(dapo).algorithm_changes == expected
    chosen = with_sets(dapo, "algorithm.clip_high=0.28").algorithm_changes
    assert chosen == expected.replace("clip_high 0.28 (grpo: 0.2), ", "")
    assert with_sets().algorithm_changes is None
    # Without a penalty, its place is not listed.
    assert "kl_in" not in str(with_sets("algorithm.name=rloo").algorithm_changes)
    assert "kl_in reward (grpo: loss)" in str(with_sets("algorithm.name=rloo", "algorithm.beta=0.1").algorithm_changes)
    # Values that follow from the estimator are listed whoever chose it.
    follows = "whiten_advantages true (grpo: false), shuffle true (grpo: false)"
    ppo = f"ppo (Schulman et al. 2017): estimator gae (grpo: grpo), {follows}"
    assert with_sets("algorithm.name=ppo").algorithm_changes == ppo
    gae = (dapo, "algorithm.estimator=gae", "algorithm.clip_high=0.2", "algorithm.filter=none")
    assert with_sets(*gae).algorithm_changes == f"dapo (Yu et al. 2025) with estimator gae: {follows}"


CORRECTIONS = rows_of("""
run.seed=0 | none None None
rollout.max_staleness=2 | truncate token 0.0001
rollout.max_staleness=2 algorithm.name=gspo | truncate geometric 0.0001
rollout.max_staleness=2 algorithm.name=gspo algorithm.ratio_level=token | truncate token 0.0001
rollout.max_staleness=2 algorithm.estimator=vtrace algorithm.correction=mask | mask token 0.0001
rollout.max_staleness=2 algorithm.correction_level=sequence | truncate sequence 0.0001
algorithm.estimator=vtrace | none None None
rollout.kv_cache=int8 | truncate token 0.0001
rollout.weights=int8 | truncate token 0.0001
rollout.weights=int8 algorithm.correction=none | none None None
algorithm.correction=mask algorithm.correction_veto=0 | mask token 0.0
""")


@pytest.mark.parametrize(("overrides", "expected"), CORRECTIONS)
def test_default_correction_depends_on_staleness_and_quantized_rollouts(overrides: str, expected: str) -> None:
    resolved = with_sets("rollout.scheduler=adaptive", *overrides.split())
    ours = resolved.settings.algorithm
    assert f"{ours.correction} {ours.correction_level} {ours.correction_veto}" == expected
    check_for_train(resolved)
    is_chosen = "algorithm.correction=" in overrides
    assert resolved.provenance["algorithm.correction"] == ("set" if is_chosen else "derived")


def test_reward_functions_default_to_none_with_an_environment() -> None:
    alone = over_defaults("env.source=guess_number")
    assert alone.settings.reward.functions == () and alone.provenance["reward.functions"] == "derived"
    check_for_train(alone)
    assert [f.name for f in over_defaults("env.tools=calculator").settings.reward.functions] == ["arithmetic"]
    both = over_defaults("env.source=guess_number", "reward.functions=gsm8k")
    assert [f.name for f in both.settings.reward.functions] == ["gsm8k"]


def test_without_evaluation_there_is_no_best_checkpoint() -> None:
    assert over_defaults().settings.checkpoint.best_metric == "eval/accuracy"
    # The second text is like settings.yaml of a run, which always contains the metric.
    for text in ("run: {seed: 0}", "checkpoint: {best_metric: eval/accuracy}"):
        resolved = load_text(text, "eval.every_steps=0")
        check_for_train(resolved)
        assert resolved.settings.checkpoint.best_metric is None
        assert resolved.origin("checkpoint.best_metric") == "other settings or devices"


@pytest.mark.parametrize(
    ("overrides", "environ", "expected"),
    [
        ("model.path=builtin:tiny mesh.pretend=v5e-8", {}, (64, 16, 8, "float32")),
        ("model.path=owner/name mesh.pretend=v5e-8", {}, (8, 512, 512, "bfloat16")),
        ("model.path=owner/name mesh.pretend=v5e-8 rollout.mode=exact", {}, (8, 512, 512, "float32")),
        ("model.path=owner/name mesh.platform=cpu rollout.max_new_tokens=9", {}, (8, 512, 9, "float32")),
        ("mesh.platform=cuda model.dtype=float32", {"GRPO__MODEL__PATH": "a.gguf"}, (8, 512, 512, "float32")),
    ],
)
def test_only_built_in_models_default_to_the_sizes_of_the_quickstart(overrides, environ, expected) -> None:
    resolved = load(None, overrides.split(), environ)
    names = "rollout.prompts_per_step", "data.max_prompt_length", "rollout.max_new_tokens", "model.dtype"
    assert attrgetter(*names)(resolved.settings) == expected
    is_told = any(line.startswith("defaults for models that are not built in") for line in launch_notices(resolved))
    assert is_told == (resolved.settings.model.path != "builtin:tiny")
