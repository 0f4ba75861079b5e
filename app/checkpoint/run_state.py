"""All that a run changes from step to step, beside its place in the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.update.optimizer import TrainState


@dataclass(frozen=True)
class RunState:
    policy: TrainState
    critic: TrainState | None = None
    """None, and no memory, for algorithms without one."""
    kl_coef: float = 0.0
    """Weight of the KL in the reward, which an adapted penalty changes."""

    @property
    def arrays(self) -> Any:
        """What a checkpoint holds on disk: where there is no critic, the policy's state alone."""
        return combine_networks(self.policy, self.critic)

    @classmethod
    def from_arrays(cls, arrays: Any, *, kl_coef: float) -> RunState:
        """The inverse of `arrays`."""
        if isinstance(arrays, TrainState):
            return cls(arrays, None, kl_coef)
        return cls(arrays["policy"], arrays["critic"], kl_coef)


def combine_networks(policy: Any, critic: Any) -> Any:
    """A tree for each network, joined as `RunState.arrays` has them."""
    return policy if critic is None else {"policy": policy, "critic": critic}
