"""Writes the generated pages of sops/reference/: all settings from the schema, and all metrics from their registry.

python scripts/reference_pages.py
"""

from __future__ import annotations

from pathlib import Path

from app.commands.settings import describe_field
from app.report.metric_registry import metrics_page
from settings.loading.fields import FIELDS

REFERENCE = Path(__file__).resolve().parents[1] / "sops" / "reference"


def settings_page() -> str:
    """Returns the page of all settings: name, type, default and meaning, one table for each section."""
    lines = ["# Settings", "", "Generated from `settings/schema/` by `python scripts/reference_pages.py`.", ""]
    section = None
    for name, field in FIELDS.items():
        if (head := name.split(".")[0]) != section:
            section = head
            lines += ["", f"## `{section}`", "", "| setting | type | default | meaning |", "|---|---|---|---|"]
        cells = (f"`{name}`", *describe_field(field).values())
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page}


def main() -> None:
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
