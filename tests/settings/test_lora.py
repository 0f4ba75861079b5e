from __future__ import annotations

import re

import pytest

from settings import InputError, Resolved
from settings.checks.commands import check_for_train
from settings.checks.unused_settings import launch_notices, unused_adapter_notices
from settings.schema.model import PROJECTIONS, TARGETS
from tests.settings.loading import with_sets

RANK = "model.lora.rank=8"


def refusal(resolved: Resolved) -> str:
    with pytest.raises(InputError) as caught:
        check_for_train(resolved)
    return str(caught.value)


def test_without_a_rank_there_are_no_adapters() -> None:
    for resolved in (with_sets(), with_sets("model.lora.rank=0"), with_sets("model.lora.rank=null")):
        assert not resolved.settings.model.lora.rank
        check_for_train(resolved)
        assert launch_notices(resolved) == () == unused_adapter_notices(resolved)


@pytest.mark.parametrize(
    ("targets", "meant"),
    [
        ("all", PROJECTIONS),
        ("[all, q_proj]", PROJECTIONS),
        ("attention", PROJECTIONS[:4]),
        ("[mlp, v_proj, q_proj, v_proj]", ("q_proj", "v_proj", *PROJECTIONS[4:])),
        ("down_proj", ("down_proj",)),
    ],
)
def test_targets_name_projections_or_parts_of_a_layer_in_any_order(targets: str, meant: tuple[str, ...]) -> None:
    resolved = with_sets(RANK, f"model.lora.targets={targets}")
    assert resolved.settings.model.lora.projections == meant
    check_for_train(resolved)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.lora.targets=lm_head", f"model.lora.targets[0]: expected one of {', '.join(TARGETS)}, got 'lm_head'"),
        (
            "model.lora.targets=[q_proj, k_prj]",
            f"model.lora.targets[1]: expected one of {', '.join(TARGETS)} (did you mean k_proj?), got 'k_prj'",
        ),
        ("model.lora.targets=[]", "model.lora.targets: "),
        ("model.lora.r=8", "unknown setting model.lora.r"),
    ],
)
def test_what_matches_no_weight_or_makes_no_adapter_is_refused(override: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        with_sets(override)
