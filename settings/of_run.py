"""The settings that a run has written, as the base of another run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

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


def freed(path: str, overrides: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """`--set` options beside `overrides`: what followed from the run's algorithm follows from one that is set now.

    The file says of every setting what it was. With another `algorithm.name` alone, estimator, clip and aggregation
    would stay what the old one had decided.

    Raises: InputError for whatever is wrong with the file or the overrides.
    """
    now = load(path, overrides, environ).provenance
    if all(now[field].startswith("yaml:") for field in CHOICES):
        return []
    written = from_yaml(Path(path).read_bytes(), name=path)
    followed = [field for field in FOLLOWING if written.get(field, (None, ""))[1] == "derived"]
    return [f"{field}=null" for field in followed if now[field].startswith("yaml:")]
