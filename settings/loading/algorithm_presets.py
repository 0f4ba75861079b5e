"""What an `algorithm.name` decides among the settings that are left null."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from settings.schema.algorithm import CRITIC_ESTIMATORS, AlgorithmSettings


@dataclass(frozen=True, slots=True)
class AlgorithmPreset:
    """Fields named as those of `algorithm`; the defaults are GRPO's."""

    source: str
    estimator: str = "grpo"
    ratio_level: str = "token"
    clip: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    loss_aggregation: str = "token-mean"
    kl_in: str = "loss"
    filter: str = "none"


ALGORITHM_PRESETS: Mapping[str, AlgorithmPreset] = MappingProxyType(
    {
        # The paper takes sequence-mean-token-mean, which favours short right answers and long wrong ones;
        # the token mean of Yu et al. 2025 (DAPO) is what TRL and verl have as their default, too.
        "grpo": AlgorithmPreset("Shao et al. 2024"),
        "dr_grpo": AlgorithmPreset("Liu et al. 2025", estimator="dr_grpo", loss_aggregation="constant-length"),
        # The whole completion is one action, its reward already holds the penalty.
        "rloo": AlgorithmPreset(
            "Ahmadian et al. 2024", estimator="rloo", loss_aggregation="sequence-mean-token-sum", kl_in="reward"
        ),
        "reinforce_plus_plus": AlgorithmPreset("Hu 2025", estimator="reinforce_plus_plus", kl_in="reward"),
        # A ratio of whole sequences moves far less than one of tokens, hence the narrow clip: section 5.1.
        "gspo": AlgorithmPreset(
            "Zheng et al. 2025",
            ratio_level="sequence",
            clip_low=3e-4,
            clip_high=4e-4,
            loss_aggregation="sequence-mean-token-mean",
        ),
        "dapo": AlgorithmPreset("Yu et al. 2025", clip_high=0.28, filter="zero_variance"),
        # No lower bound, and an upper one that the paper tunes but does not tell: both numbers are those of verl's
        # example. 1 - 10 is below any ratio. Dynamic sampling is DAPO's (section 3.1).
        "cispo": AlgorithmPreset("MiniMax 2025", clip="cispo", clip_low=10.0, clip_high=0.2, filter="zero_variance"),
        # And Stiennon et al. 2020 for the penalty.
        "ppo": AlgorithmPreset("Schulman et al. 2017", estimator="gae", kl_in="reward"),
    }
)

DEFAULT_KL_ESTIMATORS: Mapping[str, str] = MappingProxyType({"loss": "k3", "reward": "k1"})
"""Of Shao et al. 2024, eq. 4, and Ahmadian et al. 2024."""

DEFAULT_CORRECTION_VETO = 1e-4
"""What `algorithm.correction_veto` is where there is a correction: the usual value of verl's veto."""

GROUP_RELATIVE_ESTIMATORS = frozenset({"grpo", "dr_grpo", "rloo"})
"""Estimators by which a sample is as good as it stands out in its group."""

PRESET_FIELDS = ("estimator", "ratio_level", "clip", "clip_low", "clip_high", "loss_aggregation", "kl_in", "filter")
"""Fields of `algorithm` that the name decides where they are null."""


def estimator_defaults(estimator: str) -> dict[str, bool]:
    """Fields of `algorithm` that follow from the estimator where they are null."""
    return {"whiten_advantages": estimator not in GROUP_RELATIVE_ESTIMATORS, "shuffle": estimator in CRITIC_ESTIMATORS}


def describe_changes(algorithm: AlgorithmSettings, derived_fields: Collection[str]) -> str | None:
    """What was decided otherwise than `grpo` would have it, for people; None where that is nothing.

    Args:
        decided: fields of `algorithm` that the name or the estimator has decided, not the user.
    """
    grpo = ALGORITHM_PRESETS["grpo"]
    usual = {field: getattr(grpo, field) for field in PRESET_FIELDS} | estimator_defaults(grpo.estimator)
    told = {
        field: f"{field} {_format_value(value)} (grpo: {_format_value(usual[field])})"
        for field in usual
        if field in derived_fields and (value := getattr(algorithm, field)) not in (None, usual[field])
    }
    # An estimator of the user's own choice has its consequences, too.
    by_estimator = (
        [] if "estimator" in derived_fields else [told.pop(field) for field in [*told] if field not in PRESET_FIELDS]
    )
    lines = (
        [f"{algorithm.name} ({ALGORITHM_PRESETS[algorithm.name].source}): {', '.join(told.values())}"] if told else []
    )
    if by_estimator:
        lines.append(f"estimator {algorithm.estimator}: {', '.join(by_estimator)}")
    return "\n".join(lines) or None


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
