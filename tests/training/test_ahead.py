"""`rollout.max_staleness`: training on samples of earlier policies, while the next are generated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.program import metrics_of, records_of, reproducible, train_here

WORKERS = (
    "rollout.scheduler=adaptive",
    *("rollout.workers.fast.slots=4", "rollout.workers.heavy.slots=4"),
    *("rollout.workers.fast.devices=[0]", "rollout.workers.heavy.devices=[1]"),
)
NO_EVALUATION = ("eval.every_steps=0", "checkpoint.best_metric=null", "checkpoint.every_steps=0")


@pytest.mark.parametrize("k", [1, 2])
def test_no_token_is_older_than_allowed(config: Path, k: int) -> None:
    result = train_here(config, *WORKERS, f"rollout.max_staleness={k}", "logging.save_rollouts=true")
    assert result.exit_code == 0, result.stderr
    run = config.parent / "runs" / "tiny"
    lines = [line for line in metrics_of(run) if line["step"]]
    assert len(lines) == 4
    print(
        [
            (
                l["perf/rollout/staleness_mean"],
                l["perf/rollout/staleness_max"],
                l["perf/compilations"],
                l["time/rollout_s"],
                l["time/step_s"],
            )
            for l in lines
        ]
    )
    assert all(line["perf/rollout/staleness_mean"] <= line["perf/rollout/staleness_max"] <= k for line in lines)
