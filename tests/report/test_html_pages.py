"""Tests that pages need no network, and are harmless whatever models, data and settings contain."""

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from app.records.jsonl import write_jsonl
from app.report.write_report import json_for_html, write_report
from tests.program import here, run_python
from tests.report.run_directories import SMALL_HISTORY, quickstart_history, sample_record, step_record, write_run

HOSTILE = (
    "</script><img src=x onerror=\"document.title='owned'\"><!-- <script>alert(1)</script> \u2028\u202e ]]> {{ 7*7 }}"
)


class Parsed(HTMLParser):
    """A page as a browser parses it: the tag, the attributes and the text of each element."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_data(self, data: str) -> None:
        if self.elements:
            self.elements[-1][2].append(data)

    def handle_endtag(self, tag: str) -> None:
        self.elements.append(("", {}, []))

    def texts(self, tag: str) -> list[str]:
        return ["".join(text) for name, _, text in self.elements if name == tag]

    def policy(self) -> str:
        (policy,) = [a["content"] for _, a, _ in self.elements if a.get("http-equiv") == "Content-Security-Policy"]
        assert policy is not None
        return policy


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run with an alert, in which all external text is hostile."""
    hostile = {"prompt": HOSTILE, "answer": HOSTILE, "rewards": {HOSTILE: 1.0}, "finish_reason": HOSTILE}
    samples = [sample_record(f"{HOSTILE}/s{i}", HOSTILE, **hostile) for i in range(3)]
    cut = [step_record(step, completions__truncated_fraction=0.5) for step in range(1, 12)]
    path = write_run(
        tmp_path_factory.mktemp("hostile") / "run",
        [quickstart_history()[0], *({**record, f"reward/{HOSTILE.replace('/', '')}/mean": 0.5} for record in cut)],
        rollouts={2: samples},
        evaluations={0: samples},
        settings=(f"data.system_prompt={json.dumps(HOSTILE)}", "run.steps=200"),
    )
    session = {"started": HOSTILE, "devices": "8 × TPU v4", "processes": 2, "from_rollouts": "runs/other"}
    (path / "sessions.jsonl").write_text(json.dumps(session) + "\n")
    with (path / "rollouts" / "step_000002.jsonl").open("a") as file:
        file.write(f'{{"uid": {json.dumps(HOSTILE)}, "completion": {json.dumps([HOSTILE])}}}\n')
    write_report(path)
    return path


@pytest.mark.parametrize(("name", "num_scripts"), [("report.html", 0), ("rollouts.html", 2)])
def test_hostile_text_never_becomes_an_html_element(run: Path, name: str, num_scripts: int) -> None:
    page = Parsed(run / name)
    tags = [tag for tag, _, _ in page.elements]
    assert not {"img", "link", "iframe"} & {*tags} and tags.count("script") == num_scripts
    for tag, attributes, _ in page.elements:
        assert not [a for a in attributes if a.startswith("on") or a in ("src", "srcset", "action")], tag
        for reference in ("href", "xlink:href"):
            target = attributes.get(reference)
            assert target is None or re.fullmatch(r"#\w+|report\.html|rollouts\.html", target), target
    assert "49" not in "".join(page.texts("td"))


def test_pages_allow_only_their_own_script_and_style(run: Path) -> None:
    policy = Parsed(run / "report.html").policy()
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; ")
    assert "script-src" not in policy and "http" not in policy
    page = Parsed(run / "rollouts.html")
    (style,), (data, script) = page.texts("style"), page.texts("script")
    for kind, content in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in page.policy()
    assert "unsafe" not in page.policy() and "http" not in page.policy()
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write", script)
    groups = json.loads(data)
    assert page.texts("option")[-7:-4] == ["truncated", "complete", "dropped"]
    assert {sample["completion"] for group in groups for sample in group["samples"]} == {HOSTILE}
    assert {group["prompt"] for group in groups} == {HOSTILE}


def test_the_html_report_contains_settings_alerts_plots_and_sessions(run: Path) -> None:
    report, samples = (re.sub(r"\s+", " ", (run / f"{name}.html").read_text()) for name in ("report", "rollouts"))
    for part in (
        *("<h1>run</h1>", "step 11 of 200", "builtin:tiny", "<b>Step 5: Many answers are truncated.</b>"),
        *("<p>Without data in this run: ", '<span id="kl">KL to the initial model or the teacher</span>', "8 × TPU v4"),
        *("<th>from rollouts</th>", "runs/other", f"grpo report {run}"),
        '<td><code>run.steps</code></td><td class="text"><code>200</code></td>',
    ):
        assert part in report, part
    assert report.count("<svg ") == 13 and "<th>checkpoint</th>" not in report
    assert "6 of the 6 samples in 2 of 2 files" in samples
    assert "1 damaged lines were skipped" in samples and "step_000002.jsonl:4: completion: expected text" in samples


def test_the_sample_viewer_says_what_it_omits_and_why_it_is_empty(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", SMALL_HISTORY, rollouts={1: [sample_record(f"p/s{i}", "\ud800") for i in range(6)]}
    )
    (run / "sessions.jsonl").write_text('{"devices": "\\ud800"}\n')
    write_report(run, num_samples=4)
    # Text that is not valid Unicode can be written.
    assert "&#55296;" in (run / "report.html").read_text()
    text = re.sub(r"\s+", " ", (run / "rollouts.html").read_text())
    assert "\\ud800" in text and "4 of the 6 samples" in text and f"grpo report {run} --samples 40" in text
    shutil.rmtree(run / "rollouts")
    write_report(run)
    assert "The run saved no samples: logging.save_rollouts is false" in (run / "rollouts.html").read_text()


@pytest.mark.parametrize("value", [HOSTILE, "<!--", "\u2029&", {"<a>": ["</script>"]}, "\ud800", None, 1.5])
def test_json_in_a_page_has_no_html_characters(value: Any) -> None:
    text = json_for_html(value)
    assert json.loads(text) == value
    assert text.isascii() and not set("<>&") & set(text)


def test_grpo_report_needs_neither_jax_nor_a_model_nor_a_display(tmp_path: Path) -> None:
    chosen = ("model.path=/nowhere/model", "logging.save_rollouts=false")
    samples = [sample_record(f"p/s{i}") for i in range(3)]
    run = write_run(tmp_path / "run", SMALL_HISTORY, rollouts={1: samples}, settings=chosen)
    program = (
        "import sys, cli\n"
        "try: cli.main()\n"
        "finally: print({'jax', 'transformers', 'wandb', 'matplotlib.pyplot'} & {*sys.modules}, file=sys.stderr)"
    )
    answer = run_python("-c", program, "report", run, "--json")
    assert answer.stderr == "set()\n"
    files = {"report": "report.html", "samples": "rollouts.html", "plots": "plots"}
    assert json.loads(answer.stdout) == {
        **{"steps": 1, "alerts": 0, "samples shown": 3, "damaged lines": 0},
        **{name: str(run / file) for name, file in files.items()},
    }
    assert not list(run.rglob("*.partial"))


def test_a_report_removes_plots_without_data_and_names_unwritable_folders(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{**SMALL_HISTORY[0], "policy/kl": 0.1}])
    assert here("report", run).exit_code == 0
    assert (run / "plots" / "kl.png").exists()
    (run / "plots" / "mine.png").write_bytes(b"mine")
    write_jsonl(run / "metrics.jsonl", SMALL_HISTORY)
    assert here("report", run).exit_code == 0
    assert not (run / "plots" / "kl.png").exists() and (run / "plots" / "mine.png").exists()
    (run / "plots").rename(run / "other")
    (run / "plots").write_text("in the way")
    result = here("report", run)
    way_out = "correct this and run grpo report again"
    assert result.exit_code == 2
    assert result.stderr == f"error: {run / 'plots'}: cannot be written: File exists; {way_out}\n"
