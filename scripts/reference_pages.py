"""Writes the pages of all settings and all metrics in sops/reference/ from the schema and the metric registry.

python scripts/reference_pages.py
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from app.commands.settings import describe_field
from app.report.metric_registry import METRICS, Metric
from settings.loading.fields import FIELDS

REFERENCE = Path(__file__).resolve().parents[1] / "sops" / "reference"
WIDTH = 120
SETTINGS_HEAD = (
    "# Settings",
    "This page lists every setting with its type, default and meaning, one section of the YAML file after the other. "
    "Look a name up here while you write a configuration; `grpo settings NAME` prints the same entry.",
    "`grpo train --print-config` prints the values of a run, and where each was set. This page is generated from "
    "`settings/schema/` by `python scripts/reference_pages.py`.",
)
METRICS_HEAD = (
    "# Metrics",
    "This page explains every metric that a run writes to `metrics.jsonl`, wandb and TensorBoard: what it means, which "
    "values are healthy, and what to do about others. Look a name up here when a plot or an alert surprises you; "
    "[troubleshooting](../operate/troubleshooting.md) starts from symptoms instead.",
    "Numbers that are not finite are written as null. Every metric outside `time/` and `perf/` is determined by the "
    "settings, bit for bit on the same devices, unless a plug-in is random or an environment is used in "
    "`rollout.mode: fast`, where answer times decide which samples are computed together. Generated from "
    "`app/report/metric_registry.py`; edit the table there.",
)


def settings_page() -> str:
    """Returns the page of all settings, with a heading for each section of the settings."""
    items = []
    for name, field in FIELDS.items():
        described = describe_field(field)
        items.append(
            (
                name.split(".")[0],
                f"**`{name}`** ({described['type']}; default {described['default']}): {described['meaning']}",
            )
        )
    return _page(SETTINGS_HEAD, items)


def metrics_page() -> str:
    """Returns the page of all metrics, with a heading for each prefix."""
    items = []
    for entry in METRICS:
        names = ", ".join(f"**`{name}`**" for name in entry.pattern.split(", "))
        items.append(
            (_prefix(entry), f"{names}: {entry.meaning}. Healthy: {entry.healthy}. Otherwise: {entry.remedy}.")
        )
    return _page(METRICS_HEAD, items)


def _prefix(entry: Metric) -> str:
    """Returns the heading under which the page lists a metric, such as `reward/`."""
    start, separator, _ = entry.pattern.partition("/")
    if not separator:
        return "Step and loss"
    return "perf/rollout/" if entry.pattern.startswith("perf/rollout/") else f"{start}/"


def _page(head: Iterable[str], items: list[tuple[str, str]]) -> str:
    """Returns a page of (section, text) items: the head, links to the sections, and each section's texts."""
    sections = {section: [text for other, text in items if other == section] for section, _ in items}
    titles = {name: name if name[0].isupper() else f"`{name}`" for name in sections}
    links = " · ".join(f"[{title}](#{_anchor(title)})" for title in titles.values())
    parts = [_wrap(text) for text in (*head, links)]
    for section, texts in sections.items():
        parts += [f"## {titles[section]}", "\n".join(_wrap(text, "- ") for text in texts)]
    return "\n\n".join(parts) + "\n"


def _anchor(title: str) -> str:
    """Returns the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _wrap(text: str, bullet: str = "") -> str:
    """Wraps a text to lines of at most `WIDTH` columns, without breaks inside code and links."""
    whole = re.sub(r"`[^`]+`|\[[^]]*\]\([^)]*\)", lambda match: match[0].replace(" ", "\0"), text)
    indent = " " * len(bullet)
    lines = textwrap.fill(
        whole, WIDTH, initial_indent=bullet, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\0", " ")


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page}


def main() -> None:
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
