"""Tests the metrics of expert routes against hand-computed values."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from app.batching.micro_batch_plan import MicroBatch, RowShape
from app.batching.token_batch import TokenBatch, pack_tokens
from app.model.architecture import RouteShape
from app.model.experts import UNRECORDED
from app.update.policy_loss import LossStats
from app.update.route_metrics import count_routes
from tests.tiny import make_sample

NO = UNRECORDED
LIVE = [
    # Six tokens, the last of which is padding, pass through two of four experts in each of two layers.
    [[0, 1], [0, 1], [2, 3], [0, 2], [1, 3], [0, 0]],
    [[3, 2], [3, 2], [3, 2], [3, 1], [0, 1], [0, 0]],
]
RECORDED = [[[0, 1], [1, 0], [2, 1], [NO, NO], [NO, NO]], [[1, 0], [0, 3], [3, 2], [NO, NO], [NO, NO]]]


def rows(*, replays: bool, mask: tuple[bool, ...] = (True, True, True)) -> TokenBatch:
    """Returns a prompt of two tokens and three completion tokens, which tokens 1, 2 and 3 predict."""
    routes = np.moveaxis(np.asarray(RECORDED, np.uint8), 0, 1) if replays else None
    sample = make_sample([5, 6, 7], prompt_ids=[1, 2], loss_mask=np.array(mask), routes=routes)
    shape = RouteShape(2, 2) if replays else None
    return pack_tokens([sample], MicroBatch((((0,),),), RowShape(6, 4)), shape)


def metrics_of(*batches: TokenBatch) -> dict[str, float]:
    live = jnp.asarray(LIVE)[:, None]
    stats = [LossStats({}, {}, routes=count_routes(live, batch, 4)) for batch in batches]
    total = sum(stats[1:], start=stats[0])
    return {name: float(value) for name, value in total.metrics().items()}


def test_expert_load_without_replay_counts_the_choices_of_the_router():
    # Layer 0: [0,1], [2,3], [0,2] = 2, 1, 2, 1 passes; layer 1: [3,2], [3,2], [3,1] = 0, 1, 2, 3; the mean is 1.5.
    assert metrics_of(rows(replays=False)) == {"rollout/fullest_expert": pytest.approx((2 / 1.5 + 3 / 1.5) / 2)}


def test_expert_load_with_replay_counts_the_recorded_experts():
    # Among the four recorded pairs, [1,0] is the same set as [0,1]; [2,1] and [0,3] differ from [2,3] and [3,2]. Layer
    # 0: [1,0], [2,1], live [0,2] = 2, 2, 2, 0; layer 1: [0,3], [3,2], live [3,1] = 1, 1, 1, 3.
    metrics = metrics_of(rows(replays=True))
    assert metrics == {
        "rollout/fullest_expert": pytest.approx((2 / 1.5 + 3 / 1.5) / 2),
        "rollout/route_difference": 2 / 4,
    }


def test_route_metrics_ignore_masked_tokens_and_add_up_over_micro_batches():
    # Only the second token counts, for which [2,1] differs in layer 0.
    one = rows(replays=True, mask=(False, True, False))
    assert metrics_of(one)["rollout/route_difference"] == 1 / 2
    both = metrics_of(one, rows(replays=True))
    assert both["rollout/route_difference"] == 3 / 6
    assert metrics_of(one)["rollout/fullest_expert"] == pytest.approx(2.0)


def test_route_difference_is_nan_without_routes_and_expert_load_is_zero_without_tokens():
    routes = jnp.full((1, 6, 2, 2), UNRECORDED, jnp.uint8)
    assert np.isnan(metrics_of(replace(rows(replays=True), routes=routes))["rollout/route_difference"])
    assert metrics_of(rows(replays=False, mask=(False,) * 3))["rollout/fullest_expert"] == 0
