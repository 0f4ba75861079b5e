"""Tests of the micro-batch settings of each scope: selection by layer, inheritance and contradictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from settings import InputError, Resolved, load
from settings.loading.fields import value_of
from settings.loading.sources import env_name
from tests.settings.loading import load_text

ROLES = ("policy", "reference", "reward")
SWITCHES = {"algorithm": "dynamic_microbatch", "score": "dynamic"}
SCOPES = (*SWITCHES, *(f"score.{role}" for role in ROLES))


@pytest.fixture
def resolve(folder: Path):
    """Loads a YAML text, then `--set` overrides, then environment variables."""

    def resolve(text: str, *overrides: str, **environ: str) -> Resolved:
        return load_text(folder, text or "run: {seed: 0}", *overrides, **environ)

    return resolve


def cut_of(resolved: Resolved, section: str) -> tuple[int | None, int | None]:
    """Returns the quota and the number of rows of a section."""
    scope = value_of(resolved.settings, section)
    if section in SWITCHES:
        assert value_of(resolved.settings, f"{section}.{SWITCHES[section]}") is (
            scope.max_tokens_per_device is not None
        )
    return scope.max_tokens_per_device, scope.rows_per_device


def as_yaml(field: str, value: object) -> str:
    *sections, name = field.split(".")
    text = f"{name}: {str(value).lower()}"
    for section in reversed(sections):
        text = f"{section}: {{{text}}}"
    return text


# The choice within a scope


@pytest.mark.parametrize("section", SCOPES)
def test_without_a_word_samples_are_packed_under_the_quota_of_the_update(resolve, section: str) -> None:
    resolved = resolve("")
    assert cut_of(resolved, section) == (16384, None)
    assert resolved.provenance[f"{section}.max_tokens_per_device"] == "default"


@pytest.mark.parametrize("section", SCOPES)
def test_a_number_of_rows_chooses_fixed_and_a_quota_dynamic(resolve, section: str) -> None:
    fixed = resolve("", f"{section}.rows_per_device=3")
    assert cut_of(fixed, section) == (None, 3)
    assert fixed.provenance[f"{section}.rows_per_device"] == "set"
    assert cut_of(resolve("", f"{section}.max_tokens_per_device=900"), section) == (900, None)


@pytest.mark.parametrize(("section", "switch"), SWITCHES.items())
def test_a_switch_chooses_with_the_usual_sizes(resolve, section: str, switch: str) -> None:
    assert cut_of(resolve("", f"{section}.{switch}=false"), section) == (None, 8)
    assert cut_of(resolve("", f"{section}.{switch}=false", f"{section}.rows_per_device=2"), section) == (None, 2)
    assert resolve("", f"{section}.rows_per_device=3").provenance[f"{section}.{switch}"] == "derived"
    assert resolve("", "score.dynamic=false").settings.score.strategy == "loop"


@pytest.mark.parametrize("section", SCOPES)
def test_of_two_layers_the_later_choice_wins_and_the_loser_is_null(resolve, section: str) -> None:
    rows, quota = f"{section}.rows_per_device", f"{section}.max_tokens_per_device"
    for resolved in (resolve(as_yaml(quota, 900), f"{rows}=3"), resolve("", f"{quota}=900", **{env_name(rows): "3"})):
        assert cut_of(resolved, section) == (None, 3)
        assert resolved.provenance[quota] in ("derived", "default")
    resolved = resolve(as_yaml(rows, 3), f"{quota}=900")
    assert cut_of(resolved, section) == (900, None)
    assert resolved.provenance[rows] in ("derived", "default")


@pytest.mark.parametrize(("section", "switch"), SWITCHES.items())
def test_a_later_switch_and_a_later_size_win_over_each_other(resolve, section: str, switch: str) -> None:
    rows, quota = f"{section}.rows_per_device", f"{section}.max_tokens_per_device"
    assert cut_of(resolve(as_yaml(f"{section}.{switch}", True), f"{rows}=3"), section) == (None, 3)
    assert cut_of(resolve(as_yaml(f"{section}.{switch}", False), f"{quota}=900"), section) == (900, None)
    assert cut_of(resolve(as_yaml(rows, 3), f"{quota}=900", f"{section}.{switch}=true"), section) == (900, None)


def test_null_takes_a_choice_back(resolve) -> None:
    resolved = resolve("algorithm: {rows_per_device: 3}\nscore: {strategy: scan}", "algorithm.rows_per_device=null")
    assert cut_of(resolved, "algorithm") == (16384, None)
    assert cut_of(resolve("score: {strategy: scan}", "score.strategy=null"), "score") == (16384, None)
    assert cut_of(resolve("algorithm: {max_tokens_per_device: null}"), "algorithm") == (16384, None)
    # Also the half of a contradiction.
    text = "score: {rows_per_device: 3, max_tokens_per_device: 900}"
    assert cut_of(resolve(text, "score.rows_per_device=null"), "score") == (900, None)


def test_one_pass_has_no_number_of_rows(resolve) -> None:
    for resolved in (resolve("", "score.strategy=off"), resolve("score: {rows_per_device: 3}", "score.strategy=off")):
        assert cut_of(resolved, "score") == cut_of(resolved, "score.policy") == (None, None)
        assert resolved.settings.score.strategy == "off"
    later = resolve("score: {strategy: off}", "score.rows_per_device=3")
    assert cut_of(later, "score") == (None, 3)
    assert (later.settings.score.strategy, later.provenance["score.strategy"]) == ("loop", "derived")


# Inheritance


@pytest.mark.parametrize("role", ROLES)
def test_a_role_takes_from_score_what_it_does_not_say_and_shows_where_that_was_set(resolve, role: str) -> None:
    resolved = resolve(f"score:\n  rows_per_device: 3\n  strategy: scan\n  {role}:\n    rows_per_device: 2\n")
    other = ROLES[ROLES.index(role) - 1]
    assert (cut_of(resolved, f"score.{role}"), cut_of(resolved, f"score.{other}")) == ((None, 2), (None, 3))
    assert resolved.provenance[f"score.{role}.rows_per_device"] == "yaml:c.yaml:5"
    assert resolved.provenance[f"score.{other}.rows_per_device"] == "yaml:c.yaml:2"
    assert resolved.settings.score.is_scanned(role) and resolved.settings.score.is_scanned(other)


def test_the_quota_goes_from_the_update_to_scoring_to_its_roles(resolve) -> None:
    resolved = resolve("algorithm:\n  max_tokens_per_device: 900\n")
    assert [cut_of(resolved, section)[0] for section in SCOPES] == [900] * len(SCOPES)
    assert resolved.provenance["score.reference.max_tokens_per_device"] == "yaml:c.yaml:2"
    resolved = resolve("algorithm: {max_tokens_per_device: 900}", "score.max_tokens_per_device=1800")
    assert [cut_of(resolved, section)[0] for section in SCOPES] == [900, *[1800] * (len(SCOPES) - 1)]
    assert resolved.provenance["score.policy.max_tokens_per_device"] == "set"


def test_scoring_keeps_the_quota_of_an_update_that_is_fixed(resolve) -> None:
    resolved = resolve("algorithm: {max_tokens_per_device: 900}", "algorithm.rows_per_device=2")
    assert cut_of(resolved, "algorithm") == (None, 2)
    assert cut_of(resolved, "score.policy") == (900, None)


def test_the_critic_follows_the_update_and_has_a_quota_of_its_own(resolve) -> None:
    assert cut_of(resolve(""), "critic") == (32768, None)
    assert cut_of(resolve("", "algorithm.max_tokens_per_device=900"), "critic") == (32768, None)
    assert cut_of(resolve("", "algorithm.rows_per_device=3"), "critic") == (None, 3)
    assert cut_of(resolve("", "algorithm.rows_per_device=3", "critic.rows_per_device=2"), "critic") == (None, 2)
    assert cut_of(resolve("", "algorithm.rows_per_device=3", "critic.max_tokens_per_device=64"), "critic") == (64, None)


def test_the_own_choice_of_a_role_comes_before_an_inherited_one_of_any_layer(resolve) -> None:
    text = "score: {rows_per_device: 4, reference: {max_tokens_per_device: 900}}"
    for resolved in (resolve(text), resolve(text, "score.strategy=scan")):
        assert cut_of(resolved, "score.reference") == (900, None)
        assert cut_of(resolved, "score.policy") == (None, 4)
        assert not resolved.settings.score.is_scanned("reference")
    resolved = resolve("score: {dynamic: true, max_tokens_per_device: 900, policy: {rows_per_device: 2}}")
    assert cut_of(resolved, "score.policy") == (None, 2)
    resolved = resolve("score: {strategy: off, policy: {rows_per_device: 2}}")
    assert (cut_of(resolved, "score.policy"), cut_of(resolved, "score.reference")) == ((None, 2), (None, None))


def test_the_switch_of_verl_is_that_of_scoring_and_update(resolve) -> None:
    resolved = resolve("use_dynamic_bsz: false")
    assert [cut_of(resolved, section) for section in SCOPES] == [(None, 8)] * len(SCOPES)
    resolved = resolve("use_dynamic_bsz: true\nref_logprob_mbs_per_gpu: 4")
    assert [cut_of(resolved, section)[1] for section in SCOPES] == [None, None, None, 4, None]


# Contradictions


@pytest.mark.parametrize(
    ("section", "dynamic", "fixed"),
    [
        *((section, "max_tokens_per_device=900", "rows_per_device=4") for section in (*SCOPES, "critic")),
        *((section, f"{switch}=true", "rows_per_device=4") for section, switch in SWITCHES.items()),
        *((section, "max_tokens_per_device=900", f"{switch}=false") for section, switch in SWITCHES.items()),
    ],
)
def test_one_layer_cannot_choose_both(resolve, section: str, dynamic: str, fixed: str) -> None:
    overrides = [f"{section}.{one}" for one in (dynamic, fixed)]
    with pytest.raises(InputError) as caught:
        resolve("", *overrides)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for name, _, value in (one.partition("=") for one in overrides):
        assert f"{name} = {value.capitalize()} (from --set)" in message
    names = [one.partition("=")[0] for one in overrides]
    assert message.endswith(f"remove {names[1]} for the quota, or {names[0]} for fixed rows")
    with pytest.raises(InputError, match="; remove"):
        resolve("", **{env_name(one.partition("=")[0]): one.partition("=")[2] for one in overrides})


def test_a_strategy_is_of_fixed_rows_alone(resolve) -> None:
    with pytest.raises(InputError, match=r"score\.dynamic = True .* score\.strategy = 'scan'"):
        resolve("", "score.dynamic=true", "score.strategy=scan")
    with pytest.raises(InputError) as caught:
        resolve("", "score.strategy=off", "score.rows_per_device=4")
    assert str(caught.value) == (
        "score.strategy = 'off' (from --set) selects one pass over all samples, but score.rows_per_device = 4 "
        "(from --set) selects several; remove score.rows_per_device, or set score.strategy to loop or scan"
    )


def test_a_contradiction_names_what_was_written(resolve) -> None:
    with pytest.raises(InputError) as caught:
        resolve("use_dynamic_bsz: true\nalgorithm:\n  rows_per_device: 4\nref_logprob_mbs_per_gpu: 2\n")
    assert str(caught.value) == (
        "a token quota follows from algorithm.dynamic_microbatch = True (from yaml:c.yaml:1), "
        "but fixed rows from algorithm.rows_per_device = 4 (from yaml:c.yaml:3); "
        "remove algorithm.rows_per_device for the quota, or use_dynamic_bsz for fixed rows"
    )


def test_all_contradictions_are_told_at_once(resolve) -> None:
    with pytest.raises(InputError) as caught:
        resolve("use_dynamic_bsz: true\nalgorithm: {rows_per_device: 4}\nscore: {rows_per_device: 2}\n")
    assert len(str(caught.value).splitlines()) == 2


# What the user is told, and printing


def test_a_choice_of_the_environment_that_overrides_one_of_the_command_line_is_announced(resolve) -> None:
    resolved = resolve("", "score.rows_per_device=4", GRPO__SCORE__MAX_TOKENS_PER_DEVICE="900")
    assert resolved.notices == (
        "environment variable GRPO__SCORE__MAX_TOKENS_PER_DEVICE overrides score.rows_per_device 4 from --set",
    )
    assert resolve("score: {rows_per_device: 4}", "score.max_tokens_per_device=900").notices == ()
    assert resolve("", "score.rows_per_device=4", GRPO__SCORE__DYNAMIC="false").notices == ()


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("use_dynamic_bsz=false",),
        ("score.strategy=off", "score.reference.max_tokens_per_device=900", "algorithm.rows_per_device=2"),
        ("score.rows_per_device=3", "score.strategy=scan", "algorithm.max_tokens_per_device=900"),
    ],
)
def test_what_is_printed_cuts_the_same_when_loaded_again(folder: Path, overrides: tuple[str, ...]) -> None:
    resolved = load(None, overrides, {})
    again = load_text(folder, resolved.to_yaml())
    assert again.settings == resolved.settings
    assert not {"default", "derived"} & set(again.provenance.values())


SIZES = {"max_tokens_per_device": st.integers(1, 9), "rows_per_device": st.integers(1, 9)}
PARTS = {
    **{f"{section}.{part}": values for section in SCOPES for part, values in SIZES.items()},
    **{f"{section}.{switch}": st.booleans() for section, switch in SWITCHES.items()},
    "score.strategy": st.sampled_from(["off", "loop", "scan"]),
}
FIELD_AND_VALUE = st.one_of([st.tuples(st.just(field), values | st.none()) for field, values in PARTS.items()])
LAYER = st.lists(FIELD_AND_VALUE, max_size=4, unique_by=lambda item: item[0]).map(dict)


@given(in_set=LAYER, in_environment=LAYER)
def test_whatever_is_said_each_scope_is_either_dynamic_or_fixed(in_set: dict, in_environment: dict) -> None:
    overrides = [f"{field}={json.dumps(value)}" for field, value in in_set.items()]
    environ = {env_name(field): json.dumps(value) for field, value in in_environment.items()}
    try:
        resolved = load(None, overrides, environ)
    except InputError as error:
        assert "; remove " in str(error)
        return
    score = resolved.settings.score
    for section in SCOPES:
        quota, rows = cut_of(resolved, section)
        assert (quota is None) or (rows is None)
        assert quota is not None or rows is not None or (score.strategy == "off" and section != "algorithm")
    assert (score.strategy is None) == score.dynamic
    # The last layer has its will, whatever else was said.
    for name, value in in_environment.items():
        assert value is None or value_of(resolved.settings, name) == value


def test_verls_general_switch_may_stand_beside_that_of_a_part_where_they_agree() -> None:
    settings = load(None, ["use_dynamic_bsz=false", "log_prob_use_dynamic_bsz=false"], {}).settings
    assert settings.score.dynamic is False and settings.algorithm.dynamic_microbatch is False


def test_a_reward_model_takes_the_quota_of_score_and_verls_name_sets_it(resolve) -> None:
    assert resolve("", "score.max_tokens_per_device=500").settings.score.reward.max_tokens_per_device == 500
    score = resolve("", "forward_max_token_len_per_gpu=900").settings.score
    assert (score.critic.max_tokens_per_device, score.reward.max_tokens_per_device) == (900, 900)
    assert score.policy.max_tokens_per_device != 900
    fixed = resolve("", "score.reward.rows_per_device=3").settings.score.reward
    assert (fixed.rows_per_device, fixed.max_tokens_per_device) == (3, None)
