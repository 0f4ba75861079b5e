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
UPDATE = ("algorithm", "dynamic_microbatch")
SCOPES = [UPDATE, ("score", "dynamic"), *((f"score.{role}", "dynamic") for role in ROLES)]
"""Sections with the name of their switch."""


@pytest.fixture
def resolve(folder: Path):
    """Loads a YAML text, then `--set` overrides, then environment variables."""

    def resolve(text: str, *overrides: str, **environ: str) -> Resolved:
        return load_text(folder, text or "run: {seed: 0}", *overrides, **environ)

    return resolve


def cut_of(resolved: Resolved, section: str) -> tuple[bool, int | None, int | None, str | None]:
    """Returns those of (dynamic, quota, rows, strategy) that the section has."""
    scope = value_of(resolved.settings, section)
    dynamic = scope.dynamic_microbatch if section == "algorithm" else scope.dynamic
    return (dynamic, scope.max_tokens_per_device, scope.rows_per_device, getattr(scope, "strategy", None))


def origins_of(resolved: Resolved, section: str, switch: str = "dynamic") -> list[str]:
    names = (switch, "max_tokens_per_device", "rows_per_device", "strategy")
    return [resolved.provenance[f"{section}.{name}"] for name in names if f"{section}.{name}" in resolved.provenance]


def as_yaml(field: str, value: object) -> str:
    *sections, name = field.split(".")
    text = f"{name}: {str(value).lower()}"
    for section in reversed(sections):
        text = f"{section}: {{{text}}}"
    return text


# The choice within a scope


@pytest.mark.parametrize(("section", "switch"), SCOPES)
def test_without_a_word_samples_are_packed_under_the_quota_of_the_update(resolve, section: str, switch: str) -> None:
    resolved = resolve("")
    assert cut_of(resolved, section) == (True, 16384, None, None)
    assert set(origins_of(resolved, section, switch)) == {"default"}


@pytest.mark.parametrize(("section", "switch"), SCOPES)
def test_a_number_of_rows_chooses_fixed_and_a_quota_dynamic(resolve, section: str, switch: str) -> None:
    loop = None if section == "algorithm" else "loop"
    fixed = resolve("", f"{section}.rows_per_device=3")
    assert cut_of(fixed, section) == (False, None, 3, loop)
    assert fixed.provenance[f"{section}.{switch}"] == "derived"
    assert fixed.provenance[f"{section}.rows_per_device"] == "set"
    assert cut_of(resolve("", f"{section}.max_tokens_per_device=900"), section) == (True, 900, None, None)
    assert cut_of(resolve("", f"{section}.{switch}=false"), section) == (False, None, 8, loop)
    assert cut_of(resolve("", f"{section}.{switch}=false", f"{section}.rows_per_device=2"), section)[2] == 2


@pytest.mark.parametrize(("section", "switch"), SCOPES)
def test_of_two_layers_the_later_choice_wins_and_the_loser_is_null(resolve, section: str, switch: str) -> None:
    rows, quota = f"{section}.rows_per_device", f"{section}.max_tokens_per_device"
    loop = None if section == "algorithm" else "loop"
    for resolved in (
        resolve(as_yaml(quota, 900), f"{rows}=3"),
        resolve("", f"{quota}=900", **{env_name(rows): "3"}),
        resolve(as_yaml(quota, 900), **{env_name(rows): "3"}),
        resolve(as_yaml(f"{section}.{switch}", True), f"{rows}=3"),
    ):
        assert cut_of(resolved, section) == (False, None, 3, loop)
        assert resolved.provenance[quota] in ("derived", "default")
    for resolved in (
        resolve(as_yaml(rows, 3), f"{quota}=900"),
        resolve(as_yaml(rows, 3), f"{quota}=900", f"{section}.{switch}=true"),
        resolve(as_yaml(f"{section}.{switch}", False), f"{quota}=900"),
    ):
        assert cut_of(resolved, section) == (True, 900, None, None)
        assert resolved.provenance[rows] in ("derived", "default")


def test_null_takes_a_choice_back(resolve) -> None:
    resolved = resolve("algorithm: {rows_per_device: 3}\nscore: {strategy: scan}", "algorithm.rows_per_device=null")
    assert cut_of(resolved, "algorithm") == (True, 16384, None, None)
    assert cut_of(resolve("score: {strategy: scan}", "score.strategy=null"), "score") == (True, 16384, None, None)
    assert cut_of(resolve("algorithm: {max_tokens_per_device: null}"), "algorithm") == (True, 16384, None, None)
    # Also the half of a contradiction.
    text = "score: {rows_per_device: 3, max_tokens_per_device: 900}"
    assert cut_of(resolve(text, "score.rows_per_device=null"), "score") == (True, 900, None, None)


def test_one_pass_has_no_number_of_rows(resolve) -> None:
    off = (False, None, None, "off")
    assert cut_of(resolve("", "score.strategy=off"), "score") == off
    assert cut_of(resolve("score: {rows_per_device: 3}", "score.strategy=off"), "score") == off
    later = resolve("score: {strategy: off}", "score.rows_per_device=3")
    assert cut_of(later, "score") == (False, None, 3, "loop")
    assert later.provenance["score.strategy"] == "derived"


# Inheritance


@pytest.mark.parametrize("role", ROLES)
def test_a_role_takes_from_score_what_it_does_not_say_and_shows_where_that_was_set(resolve, role: str) -> None:
    resolved = resolve(f"score:\n  rows_per_device: 3\n  strategy: scan\n  {role}:\n    rows_per_device: 2\n")
    other = ROLES[ROLES.index(role) - 1]
    assert cut_of(resolved, f"score.{role}") == (False, None, 2, "scan")
    assert origins_of(resolved, f"score.{role}") == ["derived", "default", "yaml:c.yaml:5", "yaml:c.yaml:3"]
    assert cut_of(resolved, f"score.{other}") == (False, None, 3, "scan")
    assert origins_of(resolved, f"score.{other}") == ["derived", "default", "yaml:c.yaml:2", "yaml:c.yaml:3"]


def test_the_quota_goes_from_the_update_to_scoring_to_its_roles(resolve) -> None:
    resolved = resolve("algorithm:\n  max_tokens_per_device: 900\n")
    assert [cut_of(resolved, section)[1] for section, _ in SCOPES] == [900] * len(SCOPES)
    assert resolved.provenance["score.reference.max_tokens_per_device"] == "yaml:c.yaml:2"
    resolved = resolve("algorithm: {max_tokens_per_device: 900}", "score.max_tokens_per_device=1800")
    assert [cut_of(resolved, section)[1] for section, _ in SCOPES] == [900, *[1800] * (len(SCOPES) - 1)]
    assert resolved.provenance["score.policy.max_tokens_per_device"] == "set"


def test_scoring_keeps_the_quota_of_an_update_that_is_fixed(resolve) -> None:
    resolved = resolve("algorithm: {max_tokens_per_device: 900}", "algorithm.rows_per_device=2")
    assert cut_of(resolved, "algorithm") == (False, None, 2, None)
    assert cut_of(resolved, "score.policy") == (True, 900, None, None)


def test_the_own_choice_of_a_role_comes_before_an_inherited_one_of_any_layer(resolve) -> None:
    text = "score: {rows_per_device: 4, reference: {max_tokens_per_device: 900}}"
    for resolved in (resolve(text), resolve(text, "score.strategy=scan")):
        assert cut_of(resolved, "score.reference") == (True, 900, None, None)
        assert cut_of(resolved, "score.policy")[:3] == (False, None, 4)
    resolved = resolve("score: {dynamic: true, max_tokens_per_device: 900, policy: {rows_per_device: 2}}")
    assert cut_of(resolved, "score.policy") == (False, None, 2, "loop")
    resolved = resolve("score: {strategy: off, policy: {rows_per_device: 2}, reference: {strategy: loop}}")
    assert cut_of(resolved, "score.policy") == (False, None, 2, "loop")
    assert cut_of(resolved, "score.reference") == (False, None, 8, "loop")
    resolved = resolve("score: {rows_per_device: 2, policy: {strategy: off}}")
    assert cut_of(resolved, "score.policy") == (False, None, None, "off")


def test_offloading_is_for_the_reference_alone(resolve) -> None:
    score = resolve("score: {reference: {offload: true}}").settings.score
    assert score.reference.offload is True
    assert score.for_role("reference") is score.reference and score.for_role("policy") is score.policy


def test_the_switch_of_verl_is_that_of_scoring_and_update(resolve) -> None:
    resolved = resolve("use_dynamic_bsz: false")
    assert [cut_of(resolved, section)[0] for section, _ in SCOPES] == [False] * len(SCOPES)
    assert resolved.provenance["score.policy.dynamic"] == "yaml:c.yaml:1"
    resolved = resolve("use_dynamic_bsz: true\nref_logprob_mbs_per_gpu: 4")
    assert [cut_of(resolved, section)[0] for section, _ in SCOPES] == [True, True, True, False, True]


# Contradictions


@pytest.mark.parametrize(("section", "switch"), SCOPES)
@pytest.mark.parametrize(
    ("dynamic", "fixed"),
    [
        ("{switch}: true", "rows_per_device: 4"),
        ("max_tokens_per_device: 900", "{switch}: false"),
        ("max_tokens_per_device: 900", "rows_per_device: 4"),
    ],
)
def test_one_layer_cannot_choose_both(resolve, section: str, switch: str, dynamic: str, fixed: str) -> None:
    lines = [line.format(switch=switch) for line in (dynamic, fixed)]
    parents = section.split(".")
    head = [f"{'  ' * depth}{name}:" for depth, name in enumerate(parents)]
    text = "\n".join([*head, *(f"{'  ' * len(parents)}{line}" for line in lines)])
    with pytest.raises(InputError) as caught:
        resolve(text)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for number, line in enumerate(lines, start=len(parents) + 1):
        name, _, value = line.partition(": ")
        assert f"{section}.{name} = {value.capitalize()} (from yaml:c.yaml:{number})" in message
    names = [f"{section}.{line.partition(':')[0]}" for line in lines]
    assert message.endswith(f"remove {names[1]} for the quota, or {names[0]} for fixed rows")
    sets = [f"{section}.{line.replace(': ', '=')}" for line in lines]
    with pytest.raises(InputError, match="; remove"):
        resolve("", *sets)
    with pytest.raises(InputError, match="; remove"):
        resolve("", **{env_name(one.partition("=")[0]): one.partition("=")[2] for one in sets})


@pytest.mark.parametrize("section", ["score", "score.policy", "score.reference"])
def test_a_strategy_is_of_fixed_rows_alone(resolve, section: str) -> None:
    with pytest.raises(InputError, match=rf"{section}\.dynamic = True .* {section}\.strategy = 'scan'"):
        resolve("", f"{section}.dynamic=true", f"{section}.strategy=scan")
    with pytest.raises(InputError) as caught:
        resolve("", f"{section}.strategy=off", f"{section}.rows_per_device=4")
    assert str(caught.value) == (
        f"{section}.strategy = 'off' (from --set) selects one pass over all samples, but {section}.rows_per_device = 4 "
        f"(from --set) selects several; remove {section}.rows_per_device, or set {section}.strategy to loop or scan"
    )


def test_a_contradiction_names_what_was_written(resolve) -> None:
    with pytest.raises(InputError) as caught:
        resolve("use_dynamic_bsz: true\nalgorithm:\n  rows_per_device: 4\nref_logprob_mbs_per_gpu: 2\n")
    assert str(caught.value) == (
        "algorithm.dynamic_microbatch = True (from yaml:c.yaml:1) selects a token quota, "
        "but algorithm.rows_per_device = 4 (from yaml:c.yaml:3) selects fixed rows; "
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
        ("score.rows_per_device=3", "score.policy.strategy=scan", "algorithm.max_tokens_per_device=900"),
    ],
)
def test_what_is_printed_cuts_the_same_when_loaded_again(folder: Path, overrides: tuple[str, ...]) -> None:
    resolved = load(None, overrides, {})
    again = load_text(folder, resolved.to_yaml())
    assert again.settings == resolved.settings
    assert not {"default", "derived"} & set(again.provenance.values())


PARTS = {
    "dynamic": st.booleans(),
    "max_tokens_per_device": st.integers(1, 9),
    "rows_per_device": st.integers(1, 9),
    "strategy": st.sampled_from(["off", "loop", "scan"]),
}
FIELD_AND_VALUE = st.one_of(
    [
        st.tuples(st.just(f"{section}.{switch if part == 'dynamic' else part}"), values | st.none())
        for section, switch in SCOPES
        for part, values in PARTS.items()
        if (section, part) != ("algorithm", "strategy")
    ]
)
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
    for section, _ in SCOPES:
        dynamic, quota, rows, strategy = cut_of(resolved, section)
        if dynamic:
            assert quota is not None and (rows, strategy) == (None, None)
        else:
            assert quota is None and (rows is None) == (strategy == "off")
            assert (strategy is None) == (section == "algorithm")
        # The last layer has its will, whatever else was said.
        for name, value in in_environment.items():
            if name.rpartition(".")[0] == section and value is not None:
                assert value_of(resolved.settings, name) == value


def test_verls_general_switch_may_stand_beside_that_of_a_part_where_they_agree() -> None:
    settings = load(None, ["use_dynamic_bsz=false", "log_prob_use_dynamic_bsz=false"], {}).settings
    assert settings.score.dynamic is False and settings.algorithm.dynamic_microbatch is False


def test_a_reward_model_takes_the_quota_of_score_and_verls_name_sets_it(resolve) -> None:
    assert resolve("", "score.max_tokens_per_device=500").settings.score.reward.max_tokens_per_device == 500
    score = resolve("", "forward_max_token_len_per_gpu=900").settings.score
    assert (score.critic.max_tokens_per_device, score.reward.max_tokens_per_device) == (900, 900)
    assert score.policy.max_tokens_per_device != 900
    fixed = resolve("", "score.reward.rows_per_device=3").settings.score.reward
    assert (fixed.dynamic, fixed.rows_per_device, fixed.max_tokens_per_device) == (False, 3, None)
