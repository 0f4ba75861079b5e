"""The settings that a run has written, as the base of another run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from settings.fields import value_of
from settings.papers import DECIDED, of_estimator
from settings.printing import from_yaml
from settings.resolve import load

CHOICES = ("algorithm.name", "algorithm.estimator")
"""What decides other fields of `algorithm` that nobody sets."""
FOLLOWING = tuple(
    f"algorithm.{field}"
    for field in (
        *(*DECIDED, *of_estimator("grpo"), "kl_estimator"),
        *("correction", "correction_level", "correction_veto"),
    )
)
"""These."""
FINDING_OTHERS = ("mesh.coordinator_address", "mesh.num_processes", "mesh.process_id")
"""How a host of the run found the others, who are not there any more."""


def freed(path: str, overrides: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """`--set` options beside `overrides`, for what the file says and the run that it is for should not take over.

    The file says of every setting what it was. With another `algorithm.name` alone, estimator, clip and aggregation
    would stay what the old one had decided; and a run of several hosts would be waited for on one.

    Raises: InputError for whatever is wrong with the file or the overrides.
    """
    resolved = load(path, overrides, environ)
    as_written = {field for field, origin in resolved.provenance.items() if origin.startswith("yaml:")}
    taken_back = [field for field in FINDING_OTHERS if value_of(resolved.settings, field) is not None]
    if not as_written.issuperset(CHOICES):
        written = from_yaml(Path(path).read_bytes(), name=path)
        taken_back += [field for field in FOLLOWING if written.get(field, (None, ""))[1] == "derived"]
    return [f"{field}=null" for field in taken_back if field in as_written]
