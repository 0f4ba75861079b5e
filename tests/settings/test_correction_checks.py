"""Tests of the settings of the importance correction: derived values and contradictions."""

from __future__ import annotations

import pytest

from settings import InputError, Resolved
from settings.checks.commands import check_for_rollout, check_for_train
from tests.settings.loading import with_sets

PARTS = ("correction", "correction_level", "correction_veto")
VTRACE = "algorithm.estimator=vtrace"
STALE = ("rollout.max_staleness=2", "rollout.scheduler=adaptive")


def parts_of(*overrides: str) -> tuple:
    return tuple(getattr(with_sets(*overrides).settings.algorithm, field) for field in PARTS)


def refusal(resolved: Resolved) -> str:
    with pytest.raises(InputError) as caught:
        check_for_train(resolved)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], ("none", None, None)),
        ([*STALE], ("truncate", "token", 1e-4)),
        ([*STALE, "algorithm.name=gspo"], ("truncate", "geometric", 1e-4)),
        ([*STALE, "algorithm.ratio_level=sequence"], ("truncate", "geometric", 1e-4)),
        ([*STALE, "algorithm.name=gspo", "algorithm.ratio_level=token"], ("truncate", "token", 1e-4)),
        ([VTRACE], ("none", None, None)),
        ([*STALE, VTRACE], ("truncate", "token", 1e-4)),
        ([*STALE, VTRACE, "algorithm.correction=mask"], ("mask", "token", 1e-4)),
        ([*STALE, "algorithm.name=ppo"], ("truncate", "token", 1e-4)),
        (["algorithm.correction=mask"], ("mask", "token", 1e-4)),
        (["algorithm.correction=mask", "algorithm.correction_veto=0"], ("mask", "token", 0.0)),
        ([*STALE, "algorithm.correction_level=sequence"], ("truncate", "sequence", 1e-4)),
    ],
)
def test_a_correction_follows_from_how_old_samples_may_be(overrides: list[str], expected: tuple) -> None:
    resolved = with_sets(*overrides)
    assert parts_of(*overrides) == expected
    check_for_train(resolved)
    assert resolved.provenance["algorithm.correction"] == (
        "set" if "algorithm.correction=mask" in overrides else "derived"
    )


@pytest.mark.parametrize("estimator", [(), ("algorithm.name=ppo",), (VTRACE,)])
def test_older_policies_are_corrected_somehow_whatever_credits(estimator: tuple[str, ...]) -> None:
    message = refusal(with_sets(*STALE, *estimator, "algorithm.correction=none"))
    assert message == (
        "rollout.max_staleness = 2 (from --set): tokens may come from an older policy, but algorithm.correction = "
        "'none' (from --set) treats them as on-policy; set algorithm.correction to null, or set "
        "rollout.max_staleness: 0"
    )
    check_for_train(with_sets(*estimator, "algorithm.correction=none"))
    check_for_rollout(with_sets(*STALE, *estimator, "algorithm.correction=none"))


def test_a_mask_lets_something_pass() -> None:
    bounds = ("algorithm.correction_min=1", "algorithm.correction_max=1")
    message = refusal(with_sets("algorithm.correction=mask", *bounds))
    assert message.startswith(
        "algorithm.correction_min = 1.0 (from --set) is not below algorithm.correction_max = 1.0 (from --set)"
    )
    check_for_train(with_sets("algorithm.correction=truncate", bounds[1]))
