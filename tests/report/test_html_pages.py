"""Tests that pages need no network, and are harmless whatever models, data and settings contain."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from app.report.write_report import json_for_html, write_report
from tests.report.run_directories import quickstart_history, sample_record, step_record, write_run

HOSTILE = (
    "</script><img src=x onerror=\"document.title='owned'\"><!-- <script>alert(1)</script> \u2028\u202e ]]> {{ 7*7 }}"
)
SETTINGS = (f"data.system_prompt={json.dumps(HOSTILE)}", "run.steps=200")


@dataclass
class Parsed(HTMLParser):
    """The content of a page as a browser parses it."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    contents: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        self.contents.setdefault(tag, []).append("")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.contents[self._open][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def policy(self) -> str:
        (policy,) = [a["content"] for t, a in self.tags if a.get("http-equiv") == "Content-Security-Policy"]
        assert policy is not None
        return policy


def parsed(path: Path) -> Parsed:
    page = Parsed()
    page.feed(path.read_text(encoding="utf-8"))
    return page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an alert, in which all text from outside is hostile."""
    hostile = {"prompt": HOSTILE, "answer": HOSTILE, "rewards": {HOSTILE: 1.0}, "finish_reason": HOSTILE}
    samples = [sample_record(f"{HOSTILE}/s{i}", HOSTILE, **hostile) for i in range(3)]
    cut = [step_record(step, completions__truncated_fraction=0.5) for step in range(1, 12)]
    path = write_run(
        tmp_path_factory.mktemp("hostile") / "run",
        [quickstart_history()[0], *({**record, f"reward/{HOSTILE.replace('/', '')}/mean": 0.5} for record in cut)],
        rollouts={2: samples},
        evaluations={0: samples},
        settings=SETTINGS,
    )
    session = {"started": HOSTILE, "devices": "8 × TPU v4", "processes": 2, "from_rollouts": "runs/other"}
    (path / "sessions.jsonl").write_text(json.dumps(session) + "\n")
    with (path / "rollouts" / "step_000002.jsonl").open("a") as file:
        file.write(f'{{"uid": {json.dumps(HOSTILE)}, "completion": {json.dumps([HOSTILE])}}}\n')
    write_report(path)
    return path


@pytest.mark.parametrize("name", ["report.html", "rollouts.html"])
def test_what_a_model_writes_becomes_no_element(run: Path, name: str) -> None:
    page = parsed(run / name)
    tags = [tag for tag, _ in page.tags]
    assert "img" not in tags and "link" not in tags and "iframe" not in tags
    assert tags.count("script") == (2 if name == "rollouts.html" else 0)
    for tag, attributes in page.tags:
        assert not [a for a in attributes if a.startswith("on")], tag
        assert not {"src", "srcset", "action"} & attributes.keys(), tag
        for reference in ("href", "xlink:href"):
            target = attributes.get(reference)
            assert target is None or re.fullmatch(r"#\w+|report\.html|rollouts\.html", target), target
    assert "49" not in "".join(page.contents.get("td", []))


def test_the_report_allows_no_script_at_all(run: Path) -> None:
    policy = parsed(run / "report.html").policy()
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; ")
    assert "script-src" not in policy and "http" not in policy


def test_the_viewer_allows_its_own_script_and_style_by_their_hashes(run: Path) -> None:
    page = parsed(run / "rollouts.html")
    (style,), (data, script) = page.contents["style"], page.contents["script"]
    for kind, content in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in page.policy()
    assert "unsafe" not in page.policy() and "http" not in page.policy()
    assert "innerHTML" not in script and "insertAdjacentHTML" not in script and "document.write" not in script
    groups = json.loads(data)
    assert page.contents["option"][-7:-4] == ["truncated", "complete", "dropped"]
    assert {sample["completion"] for group in groups for sample in group["samples"]} == {HOSTILE}
    assert {group["prompt"] for group in groups} == {HOSTILE}


def test_the_report_says_what_a_person_asks_first(run: Path) -> None:
    text = re.sub(r"\s+", " ", (run / "report.html").read_text())
    for part in (
        "<h1>run</h1>",
        "step 11 of 200",
        "builtin:tiny",
        "<b>Step 5: Many answers are truncated.</b>",
        "<p>Without data in this run: ",
        '<span id="kl">KL to the initial model</span>',
        "8 × TPU v4",
        "<th>from rollouts</th>",
        "runs/other",
        '<td><code>run.steps</code></td><td class="text"><code>200</code></td>',
        f"grpo report {run}",
    ):
        assert part in text, part
    assert text.count("<svg ") == 11 and "<th>checkpoint</th>" not in text


def test_the_viewer_says_what_was_left_out_and_which_lines_are_damaged(run: Path) -> None:
    text = re.sub(r"\s+", " ", (run / "rollouts.html").read_text())
    assert "6 of the 6 samples in 2 of 2 files" in text
    assert "1 damaged lines were skipped" in text and "step_000002.jsonl:4: completion: expected text" in text
    write_report(run, num_samples=4)
    text = re.sub(r"\s+", " ", (run / "rollouts.html").read_text())
    assert "4 of the 6 samples" in text and f"grpo report {run} --samples 40" in text
    write_report(run)


def test_text_that_is_no_unicode_can_be_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [step_record(1)], rollouts={1: [sample_record("p/s0", "\ud800")]})
    (run / "sessions.jsonl").write_text('{"devices": "\\ud800"}\n')
    write_report(run)
    assert "&#55296;" in (run / "report.html").read_text() and "\\ud800" in (run / "rollouts.html").read_text()


def test_a_run_without_samples_says_why(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [step_record(1)])
    write_report(run)
    assert "The run saved no samples: logging.save_rollouts is false" in (run / "rollouts.html").read_text()


@pytest.mark.parametrize("value", [HOSTILE, "<!--", "\u2029&", {"<a>": ["</script>"]}, "\ud800", None, 1.5])
def test_json_in_a_page_reads_back_and_holds_nothing_that_html_knows(value: Any) -> None:
    text = json_for_html(value)
    assert json.loads(text) == value
    assert text.isascii() and not set("<>&") & set(text)
