"""Values that `algorithm.name` gives to settings left null, for each published algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from settings.schema.algorithm import CRITIC_ESTIMATORS, AlgorithmSettings


@dataclass(frozen=True, slots=True)
class AlgorithmPreset:
    """The paper of an algorithm, and its values for the fields of `algorithm`. The defaults are GRPO's values."""

    source: str
    estimator: str | None = "grpo"
    ratio_level: str | None = "token"
    clip: str | None = "ppo"
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    loss_aggregation: str = "token-mean"
    kl_in: str = "loss"
    filter: str = "none"


ALGORITHM_PRESETS: Mapping[str, AlgorithmPreset] = {
    # The paper uses sequence-mean-token-mean, which favors short correct answers and long wrong ones.
    # The token mean of Yu et al. 2025 (DAPO) is also the default of TRL and verl.
    "grpo": AlgorithmPreset("Shao et al. 2024"),
    "dr_grpo": AlgorithmPreset("Liu et al. 2025", estimator="dr_grpo", loss_aggregation="constant-length"),
    # The whole completion is one action, so the penalty is part of its reward.
    "rloo": AlgorithmPreset(
        "Ahmadian et al. 2024", estimator="rloo", loss_aggregation="sequence-mean-token-sum", kl_in="reward"
    ),
    "maxrl": AlgorithmPreset("Tajwar et al. 2026", estimator="maxrl"),
    "reinforce_plus_plus": AlgorithmPreset("Hu 2025", estimator="reinforce_plus_plus", kl_in="reward"),
    # The ratio of a sequence changes far less than that of a token, hence the narrow clip (section 5.1).
    "gspo": AlgorithmPreset(
        "Zheng et al. 2025",
        ratio_level="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        loss_aggregation="sequence-mean-token-mean",
    ),
    "dapo": AlgorithmPreset("Yu et al. 2025", clip_high=0.28, filter="zero_variance"),
    # The paper does not report its upper bound; both bounds are verl's. The lower one has no effect, since 1 - 10 is
    # below any ratio. Dynamic sampling follows DAPO (section 3.1).
    "cispo": AlgorithmPreset("MiniMax 2025", clip="cispo", clip_low=10.0, clip_high=0.2, filter="zero_variance"),
    # The KL penalty follows Stiennon et al. 2020.
    "ppo": AlgorithmPreset("Schulman et al. 2017", estimator="gae", kl_in="reward"),
    # Task rewards, if any, are compared within groups, as in GRPO.
    "distill": AlgorithmPreset("Lu 2025", kl_in="advantage"),
    "sft": AlgorithmPreset("cross-entropy", estimator=None, ratio_level=None, clip=None, clip_low=None, clip_high=None),
}

SUPERVISED_VALUES: Mapping[str, int | str | None] = {
    "data.curriculum": "none",
    "algorithm.estimator": None,
    "rollout.group_size": 1,
    "rollout.max_staleness": 0,
    "rollout.devices": None,
    "reward.model": None,
}
"""Maps each setting that `sft` cannot use to the only value that it allows."""

DEFAULT_KL_ESTIMATORS: Mapping[str, str] = {"loss": "k3", "reward": "k1", "advantage": "k1"}
"""Default KL estimator for each value of `algorithm.kl_in`. Sources: Shao et al. 2024, eq. 4; Ahmadian et al. 2024; Lu
2025."""

DEFAULT_CORRECTION_VETO = 1e-4
"""Default of `algorithm.correction_veto` if a correction is enabled; verl's usual value."""

GROUP_RELATIVE_ESTIMATORS = frozenset({"grpo", "dr_grpo", "rloo", "maxrl"})
"""Estimators that compare a sample with the other samples of its group."""

PRESET_FIELDS = tuple(field.name for field in fields(AlgorithmPreset) if field.name != "source")
"""Fields of `algorithm` to which `algorithm.name` gives a value if they are null."""


def estimator_defaults(estimator: str | None) -> dict[str, bool]:
    """Returns the values that an estimator gives to `algorithm.whiten_advantages` and `shuffle` if they are null."""
    has_critic = estimator in CRITIC_ESTIMATORS
    return {"whiten_advantages": has_critic or estimator == "reinforce_plus_plus", "shuffle": has_critic}


def describe_changes(algorithm: AlgorithmSettings, provenance: Mapping[str, str]) -> str | None:
    """Describes the derived fields of `algorithm` whose values differ from GRPO's; None if there are none."""
    grpo = ALGORITHM_PRESETS["grpo"]
    defaults = {field: getattr(grpo, field) for field in PRESET_FIELDS} | estimator_defaults(grpo.estimator)
    derived = {name: getattr(algorithm, name) for name in defaults if provenance[f"algorithm.{name}"] == "derived"}
    changes = [
        f"{name} {value} (grpo: {defaults[name]})"
        for name, value in derived.items()
        if value not in (None, defaults[name])
    ]
    # If the user chose the estimator, some fields follow from it instead of the algorithm's name.
    chosen = "" if "estimator" in derived else f" with estimator {algorithm.estimator}"
    title = f"{algorithm.name} ({ALGORITHM_PRESETS[algorithm.name].source}){chosen}"
    return f"{title}: {', '.join(changes).lower()}" if changes else None
