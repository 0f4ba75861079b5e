import pytest

from app.rollout.scheduling.scheduler import POLICIES
from scripts.simulate import simulate_rollout


def test_the_grid_compares_all_policies_on_the_recorded_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_rollout, "SLOTS", (8,))
    monkeypatch.setattr(simulate_rollout, "PROMPTS_PER_SLOT", (1,))
    monkeypatch.setattr(simulate_rollout, "SIGMAS", (1.2,))
    cells = list(simulate_rollout.grid_cells(1))
    assert len(cells) == len({(cell["machine"], cell["lengths"]) for cell in cells}) == 2 * (3 + 2)
    for cell in cells:
        assert cell["sync"]["x_sync"] == 1
        assert all(cell[policy]["over_bound"] >= 1 for policy in POLICIES)
        for policy in POLICIES:
            assert cell[policy]["x_sync"] == pytest.approx(
                cell["sync"]["over_bound"] / cell[policy]["over_bound"], rel=1e-3
            )
    text = simulate_rollout.summary(cells)
    slower = sum(cell["pdsr_v1"]["x_sync"] < 1 for cell in cells)
    assert f"pdsr_v1 is slower than sync in {slower} of {len(cells)} cells" in text
    assert "| equal | " in text and text.count("\n| ") == 3 + 2
