from app.report.timeline import Bar, TimelinePanel, timeline_picture


def panel(**changes) -> TimelinePanel:
    values = {
        "title": "adaptive: 4 s",
        "slots": (("fast-0", 2), ("heavy-0", 1)),
        "bars": (
            Bar("fast-0", 0, 0.0, 1.0, "probe", "a"),
            Bar("fast-0", 0, 1.0, 2.0, "probe", "a"),
            Bar("fast-0", 1, 0.0, 3.0, "fast", "b"),
            Bar("fast-0", -1, 2.0, 2.5, "suspended", "a"),
            Bar("heavy-0", 0, 2.5, 4.0, "heavy", "a"),
        ),
        "makespan_s": 4.0,
        "lower_bound_s": 3.0,
    }
    return TimelinePanel(**(values | changes))


def drawn(*panels: TimelinePanel) -> str:
    return timeline_picture(panels, title="t", kind="svg").decode()


def test_a_png_is_the_same_for_the_same_schedule() -> None:
    first, second = (timeline_picture([panel(), panel()], title="t") for _ in range(2))
    assert first.startswith(b"\x89PNG") and first == second


def test_every_activity_has_its_color() -> None:
    svg = drawn(panel())
    for color in ("#e69f00", "#1f7fc4", "#d55e00", "#cc79a7"):
        assert svg.count(color) > drawn(panel(bars=())).count(color)


def test_segments_of_a_sample_are_one_bar() -> None:
    twice = panel(bars=panel().bars[:2])
    once = panel(bars=(Bar("fast-0", 0, 0.0, 2.0, "probe", "a"),))
    other = panel(bars=(panel().bars[0], panel().bars[1]._replace(sample="b")))
    assert drawn(twice) == drawn(once) != drawn(other)


def test_slots_beyond_what_fits_are_left_out() -> None:
    wide = panel(slots=(("fast-0", 100), ("heavy-0", 100)), bars=(Bar("heavy-0", 99, 0.0, 1.0, "heavy", "a"),))
    assert wide.drawn_slots == (("fast-0", 100), ("heavy-0", 28))
    assert timeline_picture([wide], title="t").startswith(b"\x89PNG")


def test_a_schedule_without_a_bound_is_drawn() -> None:
    assert drawn(panel(lower_bound_s=None)) != drawn(panel())
