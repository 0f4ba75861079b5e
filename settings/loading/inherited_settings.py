"""Uses the settings file of an earlier run as the base of a new run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

from settings.loading.algorithm_presets import PRESET_FIELDS, estimator_defaults
from settings.loading.config_file import ConfigFile
from settings.loading.fields import FIELDS, value_of
from settings.loading.printing import from_yaml
from settings.loading.resolve import load
from settings.schema.score import ForwardRole

DECIDING_FIELDS = ("algorithm.name", "algorithm.estimator")
"""Fields that determine the null fields of `algorithm`."""
ALGORITHM_DERIVED_FIELDS = tuple(
    f"algorithm.{field}"
    for field in (
        *(*PRESET_FIELDS, *estimator_defaults("grpo"), "kl_estimator"),
        *("correction", "correction_level", "correction_veto"),
    )
)
"""Fields that `DECIDING_FIELDS` determine."""
OTHER_DERIVED_FIELDS = {
    "rollout.max_length_total": ("rollout.max_new_tokens", "data.max_prompt_length"),
    "rollout.workers.lease_s": ("rollout.pool",),
    "algorithm.mini_batch_prompts": ("rollout.prompts_per_step",),
    "data.eval_source": ("data.source",),
}
"""Maps each other derived field to the fields that determine it."""
MICRO_BATCH_SCOPES = (
    ("algorithm", "score", ("max_tokens_per_device",)),
    ("algorithm", "critic", ("dynamic_microbatch", "rows_per_device")),
    *(
        ("score", f"score.{role}", ("dynamic", "max_tokens_per_device", "rows_per_device", "strategy"))
        for role in get_args(ForwardRole)
    ),
)
"""Scopes of micro-batches: the outer scope, the scope that inherits from it, and the inherited parts."""
RENDEZVOUS_FIELDS = ("mesh.coordinator_address", "mesh.num_processes", "mesh.process_id")
"""Fields that describe the hosts of the earlier run, which do not take part in the new one."""


def reset_overrides(file: ConfigFile, overrides: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Returns `--set` options that reset the settings of the file which the new run must not inherit.

    The file contains a value for every setting. Without a reset, a new `algorithm.name` would keep the estimator, clip
    and aggregation of the old one, and the new run would wait for the hosts of the old run.

    Raises: InputError if the file or the overrides are invalid.
    """
    resolved = load(file, overrides, environ)
    as_written = {field for field, origin in resolved.provenance.items() if origin.startswith("yaml:")}
    written = from_yaml(file.content, name=file.name)
    taken_back = [field for field in RENDEZVOUS_FIELDS if value_of(resolved.settings, field) is not None]
    following = {**dict.fromkeys(ALGORITHM_DERIVED_FIELDS, DECIDING_FIELDS), **OTHER_DERIVED_FIELDS}
    taken_back += [
        field
        for field, deciding in following.items()
        if not as_written.issuperset(deciding) and written.get(field, (None, ""))[1] == "derived"
    ]
    taken_back += _inherited_fields(written, FIELDS.keys() - as_written)
    return [f"{field}=null" for field in taken_back if field in as_written]


def _inherited_fields(recorded: Mapping[str, tuple[Any, str]], explicit: Collection[str]) -> Iterator[str]:
    """Yields the fields that a micro-batch scope inherited from another scope that is now set explicitly.

    The file records an inherited field with the value and origin of the outer field. Two `--set` options with equal
    values look the same and count as inherited.
    """
    explicit = {*explicit}
    for outer, inner, parts in MICRO_BATCH_SCOPES:
        if not any(f"{outer}.{part}" in explicit for part in parts):
            continue
        for field, outer_field in ((f"{inner}.{part}", f"{outer}.{part}") for part in parts):
            if field in recorded and recorded[field][0] is not None and recorded[field] == recorded.get(outer_field):
                explicit.add(field)
                yield field
