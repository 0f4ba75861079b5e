"""Tests plots, the text in them, and that they are reproducible."""

from xml.etree import ElementTree

import matplotlib
import pytest

from app.report.matplotlib_figures import render_panel
from app.report.metrics_history import History
from app.report.plots import PANELS, Panel
from tests.report.run_directories import quickstart_history, step_record

PNG = b"\x89PNG\r\n\x1a\n"
BY_NAME = {panel.name: panel for panel in PANELS}
EVERYTHING = {
    **{"policy__kl": 0.01, "policy__clip_fraction_low": 0.02, "policy__clip_fraction_high": 0.0},
    **{"policy__clip_fraction_dual": 0.01, "reward__error_count": 2, "reward__abstained_count": 64},
    **{"reward__dropped_count": 2, "reward__arithmetic_format__mean": 0.9, "value__explained_variance": 0.5},
    **{"episode__turns_mean": 2.5, "episode__end__turns": 0.5, "env__moves": 3.0, "env__score___luck": 0.5},
    **{f"perf__rollout__{name}": 1 for name in ("bubble", "makespan_s", "threshold", "stolen_by_fast")},
}


def svg_of(name: str, history: History) -> str:
    drawn = render_panel(BY_NAME[name], history)
    assert drawn is not None
    return drawn.svg


def texts(svg: str) -> list[str]:
    """Returns the texts of an SVG, which must be valid XML."""
    root = ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns:xlink="http://www.w3.org/1999/xlink" ', 1))
    return [node.text for node in root.iter("text") if node.text]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.name)
def test_each_plot_is_drawn_if_the_run_has_its_metrics(panel: Panel) -> None:
    before = dict(matplotlib.rcParams)
    drawn = render_panel(panel, [*quickstart_history(), step_record(101, **EVERYTHING)])
    assert drawn is not None
    assert drawn.png.startswith(PNG) and 5_000 < len(drawn.png) < 150_000
    assert any(text == "step" for text in texts(drawn.svg))
    assert len(drawn.svg) < 100_000
    assert "<!--" not in drawn.svg and "<metadata" not in drawn.svg and "#010203" not in drawn.svg
    assert dict(matplotlib.rcParams) == before
    nothing = {"step": 1, "reward/mean": None, "policy/clip_fraction_low": 0.0, "perf/compilations": 0}
    assert render_panel(panel, [nothing]) is None


def test_a_plot_pattern_matches_metrics_of_one_level_with_any_name() -> None:
    history = [step_record(step, env__moves=1.0, env__score___luck=0.5, env__a__b=1.0) for step in (1, 2)]
    assert {*BY_NAME["environment"].series(history)} == {"moves", " _luck"}
    assert {"moves", "_luck"} <= {text.strip() for text in texts(svg_of("environment", history))}


def test_smoothing_and_averaging_are_labelled_and_plots_are_reproducible() -> None:
    history = quickstart_history()
    assert render_panel(BY_NAME["reward"], history) == render_panel(BY_NAME["reward"], history)
    assert {"mean, each step", "mean of the last 5 steps"} <= set(texts(svg_of("reward", history)))
    short = texts(svg_of("reward", history[:12]))
    assert "mean" in short and not any("each step" in text for text in short)
    svg = svg_of("times", [step_record(step) for step in range(1, 1201)])
    assert "step (a point is the mean of 3)" in texts(svg) and len(svg) < 400_000


def test_accuracy_plot_names_the_prompts_behind_its_interval() -> None:
    history = quickstart_history()
    counted = [record | {"eval/num_prompts": 512} if "eval/accuracy" in record else record for record in history]
    assert "95 % interval (512 prompts)" in texts(svg_of("accuracy", counted))
    counted[0]["eval/num_prompts"] = 256
    assert "95 % interval (256 to 512 prompts)" in texts(svg_of("accuracy", counted))
    for unknown in (history, [record | {"eval/num_prompts": 0} for record in history]):
        assert not any("interval" in text for text in texts(svg_of("accuracy", unknown)))
    assert "difficulty_3" in texts(svg_of("accuracy", history))


def test_the_mean_of_a_plug_in_is_plotted_without_percent_and_interval() -> None:
    values = {"eval/format_rate": None, "eval/accuracy/difficulty_1": 2.0}
    history = [{**step_record(step), **values, "eval/accuracy": 3.2 * step, "eval/num_prompts": 512} for step in (1, 2)]
    shown = texts(svg_of("accuracy", history))
    assert "6" in shown and "mean value of the grader" in shown and "difficulty_1" in shown
    assert not any("%" in text or "interval" in text for text in shown)


def test_an_outlier_step_is_labelled_beyond_the_axis() -> None:
    assert "beyond the axis: 4 steps up to 9.7 s" in texts(svg_of("times", quickstart_history()))
    steady = [{**step_record(step), "time/step_s": 1.0 + step % 2, "time/update_s": 0.5} for step in range(1, 30)]
    assert not any("beyond" in text for text in texts(svg_of("times", steady)))


def test_reward_functions_with_any_name_can_be_plotted() -> None:
    names = ("_hidden", "$x$", "<b>&amp;", "a--b", "汉字", r"\frac{1}")
    history = [{**step_record(step), **{f"reward/{name}/mean": 0.5 for name in names}} for step in (1, 2)]
    labels = {label.strip() for label in texts(svg_of("reward", history))}
    assert {name.encode("ascii", "replace").decode() for name in names} <= labels
