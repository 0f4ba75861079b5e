"""What an `algorithm.name` decides among the settings that are left null."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Paper:
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


PAPERS: Mapping[str, Paper] = MappingProxyType(
    {
        # The paper takes sequence-mean-token-mean, which favours short right answers and long wrong ones;
        # the token mean of Yu et al. 2025 (DAPO) is what TRL and verl have as their default, too.
        "grpo": Paper("Shao et al. 2024"),
        "dr_grpo": Paper("Liu et al. 2025", estimator="dr_grpo", loss_aggregation="constant-length"),
        # The whole completion is one action, its reward already holds the penalty.
        "rloo": Paper(
            "Ahmadian et al. 2024", estimator="rloo", loss_aggregation="sequence-mean-token-sum", kl_in="reward"
        ),
        "reinforce_plus_plus": Paper("Hu 2025", estimator="reinforce_plus_plus", kl_in="reward"),
        # A ratio of whole sequences moves far less than one of tokens, hence the narrow clip: section 5.1.
        "gspo": Paper(
            "Zheng et al. 2025",
            ratio_level="sequence",
            clip_low=3e-4,
            clip_high=4e-4,
            loss_aggregation="sequence-mean-token-mean",
        ),
        "dapo": Paper("Yu et al. 2025", clip_high=0.28, filter="zero_variance"),
        # No lower bound, and an upper one that the paper tunes but does not tell: both numbers are those of verl's
        # example. 1 - 10 is below any ratio.
        "cispo": Paper("MiniMax 2025", clip="cispo", clip_low=10.0, clip_high=0.2),
        # And Stiennon et al. 2020 for the penalty.
        "ppo": Paper("Schulman et al. 2017", estimator="gae", kl_in="reward"),
    }
)

KL_ESTIMATORS: Mapping[str, str] = MappingProxyType({"loss": "k3", "reward": "k1"})
"""Of Shao et al. 2024, eq. 4, and Ahmadian et al. 2024."""

WHITENED = frozenset({"reinforce_plus_plus", "gae"})
"""Estimators whose advantages are whitened. Hu 2025, REINFORCE++, and Stiennon et al. 2020's PPO, which TRL has."""

COMPARING_SIBLINGS = frozenset({"grpo", "dr_grpo", "rloo"})
"""Estimators by which a sample is as good as it stands out in its group."""

DECIDED = ("estimator", "ratio_level", "clip", "clip_low", "clip_high", "loss_aggregation", "kl_in", "filter")
"""Fields of `algorithm` that the name decides where they are null."""


def changes(name: str, decided: Mapping[str, object]) -> str | None:
    """What the name stands for beside `grpo`, for people; None where that is nothing.

    Args:
        decided: fields of `algorithm` that the name has decided, not the user, with their values.
    """
    usual = PAPERS["grpo"]
    told = [
        f"{field} {_plain(value)} (grpo: {_plain(getattr(usual, field))})"
        for field, value in decided.items()
        if value != getattr(usual, field)
    ]
    return f"{name} ({PAPERS[name].source}): {', '.join(told)}" if told else None


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
