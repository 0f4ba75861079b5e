"""Tests that the generated pages of sops/reference/ are up to date with `python scripts/reference_pages.py`."""

from __future__ import annotations

import pytest

from scripts.reference_pages import PAGES, REFERENCE
from settings.loading.fields import FIELDS


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name](), "run python scripts/reference_pages.py"


def test_every_setting_has_a_row_with_type_default_and_meaning() -> None:
    rows = [line.split(" | ") for line in PAGES["settings.md"]().splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == list(FIELDS)
    assert all(len(row) >= 4 and all(cell.strip(" |") for cell in row) for row in rows)
