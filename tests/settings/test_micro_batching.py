"""Tests the micro-batch settings of each scope: selection by layer, inheritance and contradictions."""

import json
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from settings import InputError, Resolved, load
from settings.loading.config_file import ConfigFile
from settings.loading.fields import value_of
from settings.loading.sources import env_name
from tests.settings.loading import load_text, over_defaults, refusal, rows_of

ROLES = ("policy", "reference", "reward")
SWITCHES = {"algorithm": "dynamic_microbatch", "score": "dynamic"}
SCOPES = (*SWITCHES, *(f"score.{role}" for role in ROLES))


def sizes_of(resolved: Resolved, section: str) -> tuple[int | None, int | None]:
    scope = value_of(resolved.settings, section)
    if section in SWITCHES:
        switch = value_of(resolved.settings, f"{section}.{SWITCHES[section]}")
        assert switch is (scope.max_tokens_per_device is not None)
    return scope.max_tokens_per_device, scope.rows_per_device


CHOICES = rows_of("""
run: {seed: 0} | score.dynamic=false | score | None 8
run: {seed: 0} | algorithm.dynamic_microbatch=false | algorithm | None 8
algorithm: {dynamic_microbatch: true} | algorithm.rows_per_device=3 | algorithm | None 3
score: {dynamic: false} | score.max_tokens_per_device=900 | score | 900 None
algorithm: {rows_per_device: 3} | algorithm.rows_per_device=null | algorithm | 16384 None
algorithm: {max_tokens_per_device: null} | run.seed=0 | algorithm | 16384 None
score: {strategy: scan} | score.strategy=null | score | 16384 None
score: {rows_per_device: 3, max_tokens_per_device: 900} | score.rows_per_device=null | score | 900 None
score: {rows_per_device: 3} | score.strategy=off | score.policy | None None
score: {strategy: off} | score.rows_per_device=3 | score | None 3
score: {strategy: off} | score.policy.rows_per_device=2 | score.policy | None 2
score: {strategy: off} | score.policy.rows_per_device=2 | score.reference | None None
score: {rows_per_device: 4} | score.reference.max_tokens_per_device=900 | score.reference | 900 None
score: {reference: {max_tokens_per_device: 900}} | score.rows_per_device=4 | score.reference | 900 None
algorithm: {max_tokens_per_device: 900} | score.max_tokens_per_device=1800 | algorithm | 900 None
algorithm: {max_tokens_per_device: 900} | score.max_tokens_per_device=1800 | score.reward | 1800 None
algorithm: {max_tokens_per_device: 900} | algorithm.rows_per_device=2 | score.policy | 900 None
algorithm: {max_tokens_per_device: 900} | run.seed=0 | critic | 32768 None
algorithm: {rows_per_device: 3} | run.seed=0 | critic | None 3
algorithm: {rows_per_device: 3} | critic.rows_per_device=2 | critic | None 2
algorithm: {rows_per_device: 3} | critic.max_tokens_per_device=64 | critic | 64 None
use_dynamic_bsz: false | run.seed=0 | algorithm | None 8
use_dynamic_bsz: false | log_prob_use_dynamic_bsz=false | score.reward | None 8
use_dynamic_bsz: true | ref_logprob_mbs_per_gpu=4 | score.reference | None 4
run: {seed: 0} | forward_max_token_len_per_gpu=900 | score.reward | 900 None
""")
"""YAML, options of the command line, a section, and its quota and rows."""


@pytest.mark.parametrize(("text", "overrides", "section", "expected"), CHOICES)
def test_micro_batching_follows_the_latest_layer_or_is_inherited(text, overrides, section, expected):
    quota, rows = sizes_of(load_text(text, *overrides.split()), section)
    assert f"{quota} {rows}" == expected


def test_whichever_of_score_strategy_and_rows_per_device_is_set_last_wins() -> None:
    for text, override, expected in (
        ("score: {strategy: off}", "score.rows_per_device=3", ("loop", "derived")),
        ("score: {rows_per_device: 3}", "score.strategy=off", ("off", "set")),
        ("run: {seed: 0}", "score.dynamic=false", ("loop", "derived")),
    ):
        resolved = load_text(text, override)
        assert (resolved.settings.score.strategy, resolved.provenance["score.strategy"]) == expected


@pytest.mark.parametrize("role", ROLES)
def test_a_role_inherits_unset_micro_batch_settings_from_score(role: Any) -> None:
    resolved = load_text(f"score:\n  rows_per_device: 3\n  strategy: scan\n  {role}:\n    rows_per_device: 2\n")
    other = ROLES[ROLES.index(role) - 1]
    assert (sizes_of(resolved, f"score.{role}"), sizes_of(resolved, f"score.{other}")) == ((None, 2), (None, 3))
    assert resolved.provenance[f"score.{role}.rows_per_device"] == "yaml:c.yaml:5"
    assert resolved.provenance[f"score.{other}.rows_per_device"] == "yaml:c.yaml:2"
    assert resolved.settings.score.is_scanned(role) and resolved.settings.score.is_scanned(other)
    quota = load_text("score: {rows_per_device: 3}", "score.strategy=scan", f"score.{role}.max_tokens_per_device=9")
    assert not quota.settings.score.is_scanned(role)


@pytest.mark.parametrize(
    ("section", "dynamic", "fixed"),
    [
        *((section, "max_tokens_per_device=900", "rows_per_device=4") for section in ("algorithm", "score.reference")),
        ("critic", "max_tokens_per_device=900", "rows_per_device=4"),
        ("score", "dynamic=true", "rows_per_device=4"),
        ("score", "dynamic=true", "strategy=scan"),
        ("algorithm", "max_tokens_per_device=900", "dynamic_microbatch=false"),
    ],
)
def test_one_layer_cannot_set_a_token_quota_and_fixed_rows(section: str, dynamic: str, fixed: str) -> None:
    overrides = [f"{section}.{one}" for one in (dynamic, fixed)]
    message = refusal(over_defaults, *overrides)
    assert message.startswith("a token quota follows from ") and len(message.splitlines()) == 1
    quota, rows = (one.partition("=")[0] for one in overrides)
    assert message.endswith(f"(from --set); remove {rows} for the quota, or {quota} for fixed rows")
    environ = {env_name(one.partition("=")[0]): one.partition("=")[2] for one in overrides}
    assert "; remove" in refusal(load, None, [], environ)


def test_all_micro_batch_contradictions_are_listed_with_the_names_as_written() -> None:
    text = "use_dynamic_bsz: true\nalgorithm:\n  rows_per_device: 4\nscore: {rows_per_device: 2}\n"
    first, second = refusal(load_text, text).splitlines()
    assert first == (
        "a token quota follows from algorithm.dynamic_microbatch = True (from yaml:c.yaml:1), "
        "but fixed rows from algorithm.rows_per_device = 4 (from yaml:c.yaml:3); "
        "remove algorithm.rows_per_device for the quota, or use_dynamic_bsz for fixed rows"
    )
    assert second.startswith("a token quota follows from score.dynamic = True (from yaml:c.yaml:1)")


def test_a_notice_says_that_the_environment_overrides_the_command_line() -> None:
    resolved = load_text("run: {seed: 0}", "score.rows_per_device=4", GRPO__SCORE__MAX_TOKENS_PER_DEVICE="900")
    assert resolved.notices == (
        "environment variable GRPO__SCORE__MAX_TOKENS_PER_DEVICE overrides score.rows_per_device 4 from --set",
    )
    assert load_text("score: {rows_per_device: 4}", "score.max_tokens_per_device=900").notices == ()
    assert load_text("run: {seed: 0}", "score.rows_per_device=4", GRPO__SCORE__DYNAMIC="false").notices == ()


SIZES = {"max_tokens_per_device": st.integers(1, 9), "rows_per_device": st.integers(1, 9)}
PARTS = {
    **{f"{section}.{part}": values for section in SCOPES for part, values in SIZES.items()},
    **{f"{section}.{switch}": st.booleans() for section, switch in SWITCHES.items()},
    "score.strategy": st.sampled_from(["off", "loop", "scan"]),
}
FIELD_AND_VALUE = st.one_of([st.tuples(st.just(field), values | st.none()) for field, values in PARTS.items()])
LAYER = st.lists(FIELD_AND_VALUE, max_size=4, unique_by=lambda item: item[0]).map(dict)


@hypothesis.settings(max_examples=40)
@given(in_set=LAYER, in_environment=LAYER)
def test_each_section_has_dynamic_or_fixed_micro_batches_and_printed_settings_load_unchanged(
    in_set: dict, in_environment: dict
) -> None:
    overrides = [f"{field}={json.dumps(value)}" for field, value in in_set.items()]
    environ = {env_name(field): json.dumps(value) for field, value in in_environment.items()}
    try:
        resolved = load(None, overrides, environ)
    except InputError as error:
        assert "; remove " in str(error)
        return
    score = resolved.settings.score
    for section in SCOPES:
        quota, rows = sizes_of(resolved, section)
        assert (quota is None) or (rows is None)
        assert quota is not None or rows is not None or (score.strategy == "off" and section != "algorithm")
    assert (score.strategy is None) == score.dynamic
    # The last layer always wins.
    for name, value in in_environment.items():
        assert value is None or value_of(resolved.settings, name) == value
    printed = ConfigFile("printed.yaml", "printed", resolved.to_yaml().encode())
    assert load(printed, [], {}).settings == resolved.settings
