"""Resolves settings from layers: defaults, YAML, `--set`, environment, command options and derived values.

A later layer overrides an earlier one.
"""

from __future__ import annotations

import dataclasses
import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from settings.errors import InputError
from settings.loading.algorithm_presets import (
    ALGORITHM_PRESETS,
    DEFAULT_CORRECTION_VETO,
    DEFAULT_KL_ESTIMATORS,
    PRESET_FIELDS,
    SUPERVISED_VALUES,
    describe_changes,
    estimator_defaults,
)
from settings.loading.backends import expects_accelerator
from settings.loading.config_file import ConfigFile, find_config_file
from settings.loading.fields import FIELDS, ITEM_KEYS, did_you_mean, nearest_names, nested, value_of
from settings.loading.micro_batching import resolve_micro_batching
from settings.loading.printing import to_yaml
from settings.loading.sources import (
    NO_FLAGS,
    Flags,
    Layer,
    SourcedValue,
    build_layer,
    describe_origin,
    environment_entries,
    environment_notices,
    flag_entries,
    last_overrides,
    precedence,
    set_entries,
    yaml_entries,
)
from settings.loading.synonyms import ALIASES
from settings.schema.data import MIXTURE_TAG, SINGLE_TAG
from settings.schema.model import BUILTIN_PREFIX
from settings.schema.settings import LEGACY_PROMPT_ALLOWANCE, MODEL_DEFAULTS, Settings


@dataclass(frozen=True)
class Resolved:
    """The resolved settings of a command, with the provenance of each value."""

    settings: Settings
    provenance: Mapping[str, str]
    """Maps a field to `default`, `yaml:FILE:LINE`, `set`, `env:NAME`, a flag such as `--gamma`, or `derived`."""
    notices: tuple[str, ...] = ()
    """Messages to print on stderr."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    """Maps a field to the alias by which the user set it."""
    given: frozenset[str] = frozenset()
    """Fields that the user set for this command. Others are derived or from a preset, an earlier run or the schema."""

    def to_yaml(self) -> str:
        """Returns YAML that `--config` accepts, with the provenance of each value as a comment."""
        return to_yaml(self.settings, self.provenance)

    def origin(self, field: str) -> str:
        """Returns the source of a field's value as words for a message, such as `--set` or `the default`."""
        return describe_origin(self.provenance[field])

    def describe(self, field: str) -> str:
        """Returns `rollout.group_size = 1 (from env:NUM_PRE_Q)`, without the value if it is a list of mappings."""
        value = "" if field in ITEM_KEYS else f" = {_truncate(value_of(self.settings, field), 300)}"
        return f"{field}{value} (from {self.origin(field)})"

    def is_later(self, field: str, other: str) -> bool:
        """Returns whether `field` was set in a later layer than `other`."""
        return precedence(self.provenance[field]) > precedence(self.provenance[other])

    @property
    def algorithm_changes(self) -> str | None:
        """Description of the derived `algorithm` settings that differ from GRPO's; None if there are none."""
        return describe_changes(self.settings.algorithm, self.provenance)


def load(
    config: str | ConfigFile | None, overrides: Sequence[str], environ: Mapping[str, str], flags: Flags = NO_FLAGS
) -> Resolved:
    """Loads the settings of a command.

    Args:
        config: a file, its path, or the name of a preset. None means the default preset for a built-in model, and no
            file for others.
        overrides: the `--set` options.
        environ: the environment variables.
        flags: command options that set a setting.

    Raises:
        InputError: the file, an override, an environment variable or a flag is invalid.
    """
    overrides, repeated = last_overrides(overrides)
    in_set = build_layer(set_entries(overrides))
    in_environment = build_layer(environment_entries(environ))
    in_flags = build_layer(flag_entries(flags))
    layers = [in_flags, in_environment, in_set]
    file = find_config_file(_model_config(layers) if config is None else config)
    layers.append(build_layer(yaml_entries(file)))
    given_fields = frozenset[str]().union(*layers[: 4 if file.is_own else 3])
    layers.append(_defaults(_validate(layers), environ))
    given = _validate(layers)
    micro_batching, notices = resolve_micro_batching(layers)
    derived = _derive(given, _provenance(layers), config_stem=file.stem)
    layers.insert(0, micro_batching | derived)
    resolved = Resolved(
        settings=_validate(layers),
        provenance=_provenance(layers),
        notices=(*repeated, *environment_notices(in_environment, in_set, in_flags), *notices),
        aliases={
            field: name for field, leaf in ChainMap(*layers).items() if (name := leaf.given_name.lower()) in ALIASES
        },
        given=given_fields,
    )
    settings = resolved.settings
    if not (settings.reward.functions or settings.env.source or settings.has_teacher):
        raise InputError(
            f"reward.functions: expected at least one function, got [] (from {resolved.origin('reward.functions')}); "
            "add one, or set an environment (env.source) or a teacher (reference.path)"
        )
    return resolved


def _validate(layers: Sequence[Layer]) -> Settings:
    """Merges the layers, strongest first, and validates the result."""
    values = [nested({field: leaf.value for field, leaf in layer.items()}) for layer in layers]
    try:
        # pyright sees only the fields as arguments of a pydantic class.
        return Settings(layers=values)  # pyright: ignore[reportCallIssue]
    except ValidationError as error:
        leaves = ChainMap(*layers)
        # pydantic counts only valid items, so a list with an invalid item is also reported as too short.
        problems = [d for d in error.errors() if not (d["type"] == "too_short" and d["input"])]
        raise InputError("\n".join(_error_message(details, leaves) for details in problems)) from None


def _provenance(layers: Sequence[Layer]) -> dict[str, str]:
    leaves = ChainMap(*layers)
    return {field: leaves[field].origin if field in leaves else "default" for field in FIELDS}


def _model_config(layers: Sequence[Layer]) -> ConfigFile | None:
    """Returns None, which means the default preset, for a built-in model, and an empty file for others."""
    leaf = ChainMap(*layers).get("model.path")
    path = leaf.value if leaf and isinstance(leaf.value, str) else BUILTIN_PREFIX
    is_builtin = path.startswith(BUILTIN_PREFIX)
    return None if is_builtin else ConfigFile("no preset", Path(path).name.removesuffix(".gguf"), b"{}", is_own=False)


def _defaults(given: Settings, environ: Mapping[str, str]) -> Layer:
    """Returns the defaults that differ for distillation and for models that are not built in."""
    defaults: dict[str, Any] = {}
    if not given.model.path.startswith(BUILTIN_PREFIX):
        defaults |= MODEL_DEFAULTS
        if given.rollout.mode == "exact" or not expects_accelerator(given.mesh, environ):
            del defaults["model.dtype"]
    if given.algorithm.name == "distill":
        # The KL to the teacher is the only signal.
        defaults["algorithm.beta"] = 1.0
    return {name: SourcedValue(value, "derived") for name, value in defaults.items()}


def _derive(given: Settings, provenance: Mapping[str, str], *, config_stem: str) -> Layer:
    """Returns the values that other settings imply, for null fields and for fields that would have no use."""
    rollout, data = given.rollout, given.data
    prompt_allowance = max(LEGACY_PROMPT_ALLOWANCE, data.max_prompt_length)
    values = {
        "run.name": f"{_as_run_name(config_stem)}-seed{given.run.seed}",
        # Stays null for a file, because it is unknown which part of it would be held out.
        "data.eval_source": data.source if data.has_splits else None,
        "data.eval_split": "test",
        "rollout.max_length_total": rollout.max_new_tokens + prompt_allowance,
        "algorithm.mini_batch_prompts": rollout.prompts_per_step,
        **{f"algorithm.{field}": value for field, value in _algorithm_values(given).items()},
    }
    layer = {
        field: SourcedValue(value, "derived")
        for field, value in values.items()
        if value is not None and value_of(given, field) is None
    }
    if given.env.source is not None and provenance["reward.functions"] == "default":
        layer["reward.functions"] = SourcedValue((), "derived")
    # Drops the metric if a later layer than the one that set it disables evaluation.
    if given.eval.every_steps == 0 and precedence(provenance["eval.every_steps"]) > precedence(
        provenance["checkpoint.best_metric"]
    ):
        layer["checkpoint.best_metric"] = SourcedValue(None, "derived")
    if given.is_supervised:
        named = precedence(provenance["algorithm.name"])
        fixed = {field: SourcedValue(value, "derived") for field, value in SUPERVISED_VALUES.items()}
        layer |= {field: leaf for field, leaf in fixed.items() if precedence(provenance[field]) < named}
    return layer


def _algorithm_values(given: Settings) -> dict[str, Any]:
    """Returns values for null fields of `algorithm`, which follow from its other fields and from `rollout`."""
    algorithm, paper = given.algorithm, ALGORITHM_PRESETS[given.algorithm.name]
    values: dict[str, Any] = {field: getattr(paper, field) for field in PRESET_FIELDS if field != "kl_in"}
    values |= estimator_defaults(None if given.is_supervised else algorithm.estimator or paper.estimator)
    # Without a penalty, both stay null.
    if algorithm.beta > 0:
        kl_in = algorithm.kl_in or paper.kl_in
        values |= {"kl_in": kl_in, "kl_estimator": DEFAULT_KL_ESTIMATORS[kl_in]}
    is_off_policy = given.rollout.max_staleness > 0 or bool(given.rollout.rounding)
    values["correction"] = algorithm.correction or ("truncate" if is_off_policy else "none")
    if values["correction"] != "none":
        uses_sequence_ratio = (algorithm.ratio_level or paper.ratio_level) == "sequence"
        values["correction_level"] = "geometric" if uses_sequence_ratio else "token"
        values["correction_veto"] = DEFAULT_CORRECTION_VETO
    return values


def _as_run_name(stem: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:80]
    return name if name[:1].isalnum() else f"run{name}"


def _error_message(details: ErrorDetails, values: Mapping[str, SourcedValue]) -> str:
    """Formats a pydantic error as one line with field, reason, value and source."""
    location = tuple(part for part in details["loc"] if part not in (SINGLE_TAG, MIXTURE_TAG))
    depth = next(n for n in range(len(location), 0, -1) if n == 1 or _dotted(location[:n]) in FIELDS)
    field, inside = _dotted(location[:depth]), location[depth:]
    leaf = values.get(field)
    name = field + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in inside)
    origin = f" (from {describe_origin(leaf.origin)})" if leaf else ""
    if details["type"] == "extra_forbidden":
        known = list(ITEM_KEYS.get(field, ()))
        suggestion = did_you_mean(nearest_names(str(location[-1]), known)) or f"; known: {', '.join(known)}"
        return f"unknown setting {name}{origin}{suggestion}"
    reason, separator, way_out = _reason(details).partition("; ")
    return f"{name}: {reason}, got {_truncate(details['input'])}{origin}{separator}{way_out}"


def _reason(details: ErrorDetails) -> str:
    reason, value = details["msg"].removeprefix("Value error, ").partition(" after validation")[0], details["input"]
    reason = re.sub(r"Input should be |\w+ should have ", "expected ", reason)
    if details["type"] == "int_type" and isinstance(value, float) and value.is_integer():
        reason += f" (write {value:.0f})"
    return (reason[0].lower() + reason[1:]).replace("tuple", "list")


def _dotted(location: Sequence[int | str]) -> str:
    return ".".join(map(str, location))


def _truncate(value: Any, limit: int = 80) -> str:
    # Python refuses to print integers of more than 4,300 digits in decimal.
    text = hex(value) if isinstance(value, int) and value.bit_length() > 64 else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
