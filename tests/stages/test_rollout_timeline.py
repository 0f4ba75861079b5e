import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from app.report.matplotlib_figures import check_picture_path
from app.rollout.scheduling.schedule_metrics import Span
from app.stages.rollout_timeline import MAX_HEIGHT, SUPPORTED_SUFFIXES, Timeline, render_timeline, write_timeline
from settings.errors import InputError


def timeline(**changes) -> Timeline:
    values = {
        "heading": "tiny: 2 workers",
        "figures": "adaptive: 4 s",
        "slots": {"fast-0": 2, "heavy-0": 1},
        "spans": (
            Span("fast-0", 0, 0.0, 1.0, "probe", "a"),
            Span("fast-0", 0, 1.0, 2.0, "probe", "a"),
            Span("fast-0", 1, 0.0, 3.0, "fast", "b"),
            Span("fast-0", -1, 2.0, 2.5, None, "a"),
            Span("heavy-0", 0, 2.5, 4.0, "heavy", "a"),
        ),
        "makespan_s": 4.0,
    }
    return Timeline(**(values | changes))


def drawn(one: Timeline) -> str:
    return render_timeline(one, kind="svg").decode()


def test_a_png_is_the_same_for_the_same_schedule() -> None:
    first, second = (render_timeline(timeline(), kind="png") for _ in range(2))
    assert first.startswith(b"\x89PNG") and first == second


def test_every_activity_has_its_color() -> None:
    svg = drawn(timeline())
    for color in ("#e69f00", "#1f7fc4", "#d55e00", "#cc79a7"):
        assert svg.count(color) > drawn(timeline(spans=())).count(color)


def test_segments_of_a_sample_are_one_bar() -> None:
    twice = timeline(spans=timeline().spans[:2])
    once = timeline(spans=(Span("fast-0", 0, 0.0, 2.0, "probe", "a"),))
    other = timeline(spans=(timeline().spans[0], timeline().spans[1]._replace(uid="b")))
    assert drawn(twice) == drawn(once) != drawn(other)


def test_many_slots_are_drawn_thinner() -> None:
    wide = timeline(slots={"fast-0": 100, "heavy-0": 1000}, spans=(Span("heavy-0", 99, 0.0, 1.0, "heavy", "a"),))
    assert wide.size[1] == MAX_HEIGHT > timeline().size[1]
    assert "#d55e00" in drawn(wide)


class Loads(HTMLParser):
    """Collects the resources that a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href") and value]
        self.found += [tag] * (tag in ("script", "link", "iframe", "object"))


def test_a_page_holds_picture_and_figures_and_needs_nothing_else(tmp_path: Path) -> None:
    write_timeline(tmp_path / "a.html", timeline(heading='one <b> & "two"'))
    page = (tmp_path / "a.html").read_text()
    assert "<h1>one &lt;b&gt; &amp; &#34;two&#34;</h1>" in page
    assert page.count("<svg") == 1 and page.count("adaptive: 4 s") == 1 and "#d55e00" in page
    assert "currentColor" in page and "#010203" not in page
    loads = Loads()
    loads.feed(page)
    assert loads.found == [] and not re.findall(r"url\((?!#)|@import", page)
    assert "default-src 'none'" in page


def test_the_name_says_what_is_written(tmp_path: Path) -> None:
    for name, head in (("a.PNG", b"\x89PNG"), ("a.html", b"<!doctype html>")):
        write_timeline(tmp_path / name, timeline())
        assert (tmp_path / name).read_bytes().startswith(head)
    with pytest.raises(InputError, match=r"--timeline: .* ending in \.png or \.html, got a\.pdf"):
        check_picture_path(Path("a.pdf"), "--timeline", SUPPORTED_SUFFIXES)
