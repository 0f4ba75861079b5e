"""Uses the settings of an earlier run as the base of a new one: what was set is inherited, what was derived is not."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from settings.loading.config_file import ConfigFile
from settings.loading.printing import from_yaml
from settings.schema.score import ForwardRole

RENDEZVOUS_FIELDS = ("mesh.coordinator_address", "mesh.num_processes", "mesh.process_id")
"""Fields that describe the hosts of the earlier run, which do not take part in the new one."""
MICRO_BATCH_TWINS = {
    "score.max_tokens_per_device": "algorithm.max_tokens_per_device",
    "critic.rows_per_device": "algorithm.rows_per_device",
    **{
        f"score.{role}.{part}": f"score.{part}"
        for role in get_args(ForwardRole)
        for part in ("max_tokens_per_device", "rows_per_device")
    },
}
"""Fields of micro-batches, and the fields that they are inherited from, with value and provenance."""


def without_derived(file: ConfigFile) -> ConfigFile:
    """Returns the `settings.yaml` of a run with only what its user set.

    The file has a value for every setting. With all of them, a new `algorithm.name` would keep the estimator, clip and
    aggregation of the old one, and the new run would wait for the hosts of the old run.

    Raises: InputError if the file is invalid.
    """
    recorded = from_yaml(file.content, name=file.name)
    # Two `--set` options with equal values look the same as an inherited one, and give the same.
    inherited = [field for field, twin in MICRO_BATCH_TWINS.items() if recorded.get(field) == recorded.get(twin)]
    derived = [field for field, (_, origin) in recorded.items() if origin in ("default", "derived")]
    left_out = {*derived, *inherited, *RENDEZVOUS_FIELDS} - {"run.name"}
    return replace(file, left_out=frozenset(left_out))
