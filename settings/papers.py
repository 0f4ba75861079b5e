"""What an `algorithm.name` decides among the settings that are left null."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Paper:
    loss_aggregation: str
    kl_in: str


PAPERS: Mapping[str, Paper] = MappingProxyType(
    {
        # Shao et al. 2024 take sequence-mean-token-mean, which favours short right answers and long wrong ones;
        # the token mean of Yu et al. 2025 (DAPO) is what TRL and verl have as their default, too.
        "grpo": Paper(loss_aggregation="token-mean", kl_in="loss"),
        # Liu et al. 2025.
        "dr_grpo": Paper(loss_aggregation="constant-length", kl_in="loss"),
        # Ahmadian et al. 2024: the whole completion is one action, its reward already holds the penalty.
        "rloo": Paper(loss_aggregation="sequence-mean-token-sum", kl_in="reward"),
        # Schulman et al. 2017, and Stiennon et al. 2020 for the penalty.
        "ppo": Paper(loss_aggregation="token-mean", kl_in="reward"),
    }
)

KL_ESTIMATORS: Mapping[str, str] = MappingProxyType({"loss": "k3", "reward": "k1"})
"""Of Shao et al. 2024, eq. 4, and Ahmadian et al. 2024."""

WHITENED = frozenset({"reinforce_plus_plus", "gae", "ppo"})
"""Estimators whose advantages are whitened. Hu 2025, REINFORCE++, and Stiennon et al. 2020's PPO, which TRL has."""
