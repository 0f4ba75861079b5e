"""Tests README and runbooks: their commands work as printed, their settings exist, and their links lead somewhere.

Every line of a ```bash block counts. A script must exist and parse. A `grpo` command, also one that a script launches
elsewhere (after `--`), must have options that exist and settings that pass its checks. A slow test runs the commands of
the README in order, in a fresh clone.

Inline code counts as a setting if it begins with the name of a section: `rollout.group_size`, also with a value, as in
`algorithm.kl_in: reward`, with `*` or `<phase>`, or with braces. Columns of a table that name settings of another
program are ignored.
"""

import itertools
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml
from typer.main import get_group
from typer.testing import CliRunner

import cli
from app.report.metric_registry import expand_braces, find_metric
from settings import Settings, load
from settings.checks import commands as checks
from settings.loading.fields import FIELDS, SECTIONS, value_of
from settings.loading.synonyms import SYNONYMS, VERL_ROOT
from settings.loading.yaml_file import parse_scalar
from tests.program import REPOSITORY, metrics_of

PAGES = ("README.md", "CONTRIBUTING.md", "sops/**/*.md")
DOCUMENTS = {path: path.read_text(encoding="utf-8") for pattern in PAGES for path in sorted(REPOSITORY.glob(pattern))}
README = DOCUMENTS[REPOSITORY / "README.md"]
RUNBOOKS = {path: text for path, text in DOCUMENTS.items() if REPOSITORY / "sops" in path.parents}
INDEX = REPOSITORY / "sops" / "README.md"
MAX_COLUMNS, MAX_CELLS, MAX_ROW = 120, 5, 300
"""Limits of a line of prose in characters, and of a row of a table in cells and characters."""
LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGE_NAME = re.compile(r"\bsops/[\w/-]+\.(?:md|ipynb|png)\b")
MIGRATIONS = [REPOSITORY / "sops" / "migrate" / "from_trl.md", REPOSITORY / "sops" / "migrate" / "from_verl.md"]
THEIRS = {"TRL", "verl", "default there"}
"""Headings of columns that name settings of another program."""
FILE = re.compile(r"\.(json|jsonl|md|py|yaml|html|png|npz|safetensors)$")
STATED = re.compile(r"`([a-z_]+\.[a-z_.]+)` \((\d[\d.e-]*|null|true|false)[;,)]")
"""Pattern of a default, as in `checkpoint.keep` (2), maybe with more text after the value."""
CHECKS = {
    "train": checks.check_for_train,
    "evaluate": checks.check_for_evaluation,
    "rollout": checks.check_for_rollout,
    "score": checks.check_for_score,
    "gae": checks.check_for_mesh,
    "inspect-mesh": checks.check_for_inspect_mesh,
    "export": checks.check_for_mesh,
    "doctor": checks.check_for_mesh,
}
OTHERWISE = {"dry_run": checks.check_for_dry_run, "plan": checks.check_for_mesh}
"""Options with which a command runs other checks."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
SHELL_OPERATOR = re.compile(r"\d?[<>|&;]")


def bash_commands(markdown: str) -> Iterator[str]:
    """Returns each command of each ```bash block, with continued lines joined and comments removed."""
    for block in re.findall(r"^```bash\n(.*?)^```", markdown, flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if shlex.split(line, comments=True):
                yield line.strip()


def words_and_environment(command: str) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments up to the first pipe, redirection or `&&`, and the assignments before them."""
    words = shlex.split(command, comments=True)
    words = list(itertools.takewhile(lambda word: not SHELL_OPERATOR.match(word), words))
    environment = {}
    while words and ASSIGNMENT.match(words[0]):
        name, _, environment[name] = words.pop(0).partition("=")
    return words, environment


def check_command(subcommand: str, arguments: list[str], environment: dict[str, str]) -> None:
    """Raises an error if the command would stop at its options or at the checks of its settings."""
    options = get_group(cli.app).commands[subcommand].make_context(subcommand, arguments).params
    if "config" in options and not options.get("compare"):
        check = next((check for option, check in OTHERWISE.items() if options.get(option)), CHECKS[subcommand])
        check(load(options["config"], options["overrides"] or [], environment))


COMMANDS = dict.fromkeys(command for text in DOCUMENTS.values() for command in bash_commands(text))


@pytest.mark.parametrize("command", [*COMMANDS, *cli.COMMANDS.values()])
def test_documented_command_has_valid_options_and_settings(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, environment = words_and_environment(command)
    for word in words:
        if re.fullmatch(r"(\./)?(scripts/[\w/-]+\.sh|\.ci/run)", word):
            subprocess.run(["bash", "-n", REPOSITORY / word], check=True)
    if words[:1] == ["bash"] and "--" in words:
        words = words[words.index("--") + 1 :]
    if words[0].split("/")[-1] != "grpo":
        return
    monkeypatch.chdir(REPOSITORY)
    if {"--help", "--version"} & set(words):
        assert CliRunner().invoke(cli.app, words[1:], prog_name="grpo").exit_code == 0
    else:
        check_command(words[1], words[2:], environment)


SKIPPED = {
    "bash scripts/test.sh": "it runs this test",
    "pip install -e '.[tpu]'": "it downloads packages",
    "bash scripts/fetch_": "it downloads a model",
    "grpo train --config smollm2_": "it needs that model",
    "grpo doctor --config smollm2_": "it needs that model",
}
"""Maps the beginning of commands of the README that a test cannot run to the reason."""
SHORTENED = "bash scripts/quickstart.sh"
"""Beginning of a command that runs one step here; the main run, of `grpo train`, keeps its length."""


def as_script(commands: list[str]) -> str:
    lines = ["set -euo pipefail"]
    for command in commands:
        lines.append(f"echo README at $SECONDS s: {shlex.quote(command)}")
        if reasons := [reason for start, reason in SKIPPED.items() if command.startswith(start)]:
            lines.append(f"echo Not run here: {shlex.quote(reasons[0])}")
        else:
            steps = "export GRPO__RUN__STEPS=1" if command.startswith(SHORTENED) else "unset GRPO__RUN__STEPS"
            lines += [steps, command]
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_readme_commands_run_in_order_in_a_fresh_clone(tmp_path: Path) -> None:
    """The clone takes all packages but this one from the environment of the tests, so that pip needs no network."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("this is not a git repository")
    clone = tmp_path / "grpo"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, clone], check=True)
    venv.create(clone / ".venv", with_pip=True, symlinks=True)
    (clone / ".venv" / "made-by-grpo").touch()
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(clone / ".venv")}))
    (purelib / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    commands = [*bash_commands(README)]
    for skipped in SKIPPED:
        assert any(command.startswith(skipped) for command in commands), f"README no longer shows {skipped}"
    environment = os.environ | {
        "PYTHON": sys.executable,
        "GRPO_VENV": "",
        "PYTHONPATH": "",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        # As for users, but programs may come from the compilation cache of the suite.
        "XLA_FLAGS": "",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "false",
    }
    answer = subprocess.run(
        ["bash", "-c", as_script(commands)], cwd=clone, env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, f"{answer.stdout[-2000:]}\n{answer.stderr[-4000:]}"
    assert answer.stdout.count("README at ") == len(commands)
    runs = {re.sub(r"-\d{8}-\d{6}$", "-<time>", path.name) for path in (clone / "runs").iterdir()}
    assert runs == {"quickstart-<time>", "quickstart-seed0"}
    lines = metrics_of(clone / "runs" / "quickstart-seed0")
    assert max(line["step"] for line in lines) == 100
    before, *_, after = (line for line in lines if "eval/accuracy" in line)
    assert before["eval/accuracy"] <= 0.4 and after["eval/accuracy"] >= 0.9 and after["eval/format_rate"] >= 0.99
    for file in ("runs/quickstart-seed0/report.html", "before_after.png", "quickstart-model/model.safetensors"):
        assert (clone / file).stat().st_size > 1000, file


def test_every_promise_has_tests_and_every_test_folder_has_a_promise() -> None:
    contributing = DOCUMENTS[REPOSITORY / "CONTRIBUTING.md"]
    section = contributing[contributing.index("## Promises and their tests") : contributing.index("## Packages")]
    _, *rows = next(tables(section))
    named = [{*re.findall(r"`([\w/]+\.py)`", files)} for _, files in rows]
    assert all(named) and len(rows) > 40
    tests = {path.relative_to(REPOSITORY / "tests") for path in (REPOSITORY / "tests").rglob("test_*.py")}
    missing = set().union(*named) - set(map(str, tests))
    assert missing == set()
    assert {path.parent for path in tests} == {Path(name).parent for names in named for name in names}
    on_pages = {name for text in DOCUMENTS.values() for name in re.findall(r"\btests/[\w/]+\.py\b", text)}
    assert len(on_pages) > 10
    assert [name for name in sorted(on_pages) if not (REPOSITORY / name).exists()] == []


def test_documented_chain_of_stages_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the commands of "One stage at a time" in the order of their page, without evaluations of 512 prompts."""
    page = DOCUMENTS[REPOSITORY / "sops" / "reference" / "commands.md"]
    section = page[page.index("## One stage at a time") : page.index("## `grpo settings`")]
    chain = [words_and_environment(command)[0] for command in bash_commands(section)]
    assert [words[1] for words in chain] == ["rollout", "score", "score", "gae", "train"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRPO__EVAL__EVERY_STEPS", "0")
    monkeypatch.setenv("GRPO__LOGGING__REPORT", "false")
    for words in chain:
        answer = CliRunner().invoke(cli.app, words[1:], prog_name="grpo")
        assert answer.exit_code == 0, answer.stderr
        assert answer.stdout
    assert len((tmp_path / "advantages.jsonl").read_text().splitlines()) == 8


def without_blocks(markdown: str) -> str:
    return re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)


def tables(markdown: str) -> Iterator[list[list[str]]]:
    """Returns the rows of each table, its heading first, as lists of cells."""
    for table in re.findall(r"(?:^\|.*\n)+", markdown, flags=re.MULTILINE):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in table.splitlines()]
        yield [row for row in rows if set("".join(row)) != {"-"}]


def own_text(markdown: str) -> str:
    """Returns the text without table columns about another program."""
    text = without_blocks(markdown)
    prose = re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE)
    cells = [
        cell
        for head, *rows in tables(text)
        for row in rows
        for name, cell in zip(head, row, strict=True)
        if name not in THEIRS
    ]
    return "\n".join([prose, *cells])


def named_settings(markdown: str) -> list[str]:
    """Returns the dotted names in inline code, with braces expanded and values removed."""
    found = []
    for code in re.findall(r"`([^`\n]+)`", own_text(markdown)):
        name = re.split(r"[=: ]", code.removeprefix("--set "))[0]
        if name.split(".")[0] in SECTIONS and "." in name and not FILE.search(name):
            found += expand_braces(name)
    return found


def exists(name: str) -> bool:
    pattern = re.sub(r"<\w+>", "*", name)
    return any(fnmatchcase(known, pattern) for known in (*FIELDS, *SECTIONS))


def test_every_documented_setting_exists() -> None:
    unknown = {path.name: {*itertools.filterfalse(exists, named_settings(text))} for path, text in DOCUMENTS.items()}
    assert {name: settings for name, settings in unknown.items() if settings} == {}


def is_default(field: str, stated: str, settings: Settings) -> bool:
    """Returns whether a value is the default of the schema, or the derived one."""
    text = stated.strip("`")
    value = yaml.safe_load(text) if text.startswith(("[", "{")) else parse_scalar(text)
    value = tuple(value) if isinstance(value, list) else value
    return value in (FIELDS[field].get_default(), value_of(settings, field))


def test_every_documented_default_is_correct(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("run: {}\n")
    nothing_said = load(str(tmp_path / "empty.yaml"), [], {}).settings
    stated = [match for text in DOCUMENTS.values() for match in STATED.findall(text)]
    for document in MIGRATIONS:
        for head, *rows in tables(without_blocks(DOCUMENTS[document])):
            for row in rows if "default here" in head else ():
                fields = re.findall(r"`([^`]+)`", row[head.index("here")])
                defaults = [text.strip() for text in row[head.index("default here")].split(",") if text.strip()]
                assert len(fields) == len(defaults) or fields == ["reward.functions"], row
                stated += zip(fields, defaults, strict=bool(defaults))
    assert len(stated) > 80
    assert [(field, text) for field, text in stated if not is_default(field, text, nothing_said)] == []


@pytest.mark.parametrize(("document", "program"), [(MIGRATIONS[0], "TRL"), (MIGRATIONS[1], "verl")])
def test_errors_about_foreign_names_match_the_migration_tables(document: Path, program: str) -> None:
    found: set[str] = set()
    for head, *rows in tables(without_blocks(DOCUMENTS[document])):
        for theirs, _, here, _, remark in rows if "default here" in head else ():
            fields, names = ({*re.findall(r"`([^`]+)`", cell)} for cell in (here, theirs))
            same = names & FIELDS.keys()  # never unknown
            in_errors = [SYNONYMS[name.removeprefix(VERL_ROOT)] for name in names - same]
            found |= {synonym.title for synonym in in_errors}
            if here == "–" or names:
                assert {field for synonym in in_errors for field in synonym.fields} | same == fields
            for told in {synonym.remark for synonym in in_errors}:
                assert told == remark.replace("`", "").strip() if here == "–" else told in remark.replace("`", "")
    assert found == {synonym.title for synonym in SYNONYMS.values() if synonym.title.startswith(f"{program}'s ")}


def test_metrics_of_other_programs_are_mapped_to_known_metrics() -> None:
    for document in MIGRATIONS:
        *_, (head, *rows) = tables(without_blocks(DOCUMENTS[document]))
        assert head[1:] == ["here"]
        names = [name for _, here in rows for name in re.findall(r"`([^`]+)`", here)]
        assert len(names) > 10
        assert [name for name in names if find_metric(name) is None] == []


def relative_links(document: Path) -> list[tuple[Path, str]]:
    """Returns the file and the anchor, which may be empty, of each link of a document to a file of the repository."""
    prose = re.sub(r"`[^`\n]*`", "", without_blocks(DOCUMENTS[document]))
    links = [link.partition("#") for link in LINK.findall(prose) if not re.match(r"\w+:", link)]
    return [((document.parent / file).resolve() if file else document, anchor) for file, _, anchor in links]


def anchors(document: Path) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(DOCUMENTS[document]), flags=re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w -]", "", text).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_relative_link_resolves(document: Path) -> None:
    links = relative_links(document)
    assert [str(file) for file, _ in links if not file.exists()] == []
    assert [(file.name, anchor) for file, anchor in links if anchor and anchor not in anchors(file)] == []


def test_the_index_lists_every_page_and_notebook() -> None:
    pages = {*RUNBOOKS, *(REPOSITORY / "sops").rglob("*.ipynb")} - {INDEX}
    listed = {file for file, _ in relative_links(INDEX)}
    assert len(pages) > 40
    assert sorted(str(page.relative_to(REPOSITORY)) for page in pages - listed) == [], "add a line to sops/README.md"


def test_pages_link_to_pages_instead_of_naming_their_paths() -> None:
    pages = {"README.md": README} | {str(path.relative_to(REPOSITORY)): text for path, text in RUNBOOKS.items()}
    named = {page: PAGE_NAME.findall(LINK.sub("]", text)) for page, text in pages.items()}
    assert {page: names for page, names in named.items() if names} == {}


def test_pages_referenced_in_code_exist() -> None:
    files = [path for suffix in ("py", "sh", "yaml", "ipynb", "toml") for path in REPOSITORY.rglob(f"*.{suffix}")]
    sources = [path for path in files if not any(part.startswith(".") for part in path.relative_to(REPOSITORY).parts)]
    sources += [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    named = {name for path in sources for name in PAGE_NAME.findall(path.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert [name for name in sorted(named) if not (REPOSITORY / name).exists()] == []


def test_readme_has_at_most_120_lines() -> None:
    assert len(README.splitlines()) <= 120, "move details to a page of sops/"


@pytest.mark.parametrize(
    "document", [REPOSITORY / "README.md", *RUNBOOKS], ids=lambda path: str(path.relative_to(REPOSITORY))
)
def test_a_page_opens_with_sentences_and_can_be_read_on_narrow_screens(document: Path) -> None:
    title, opening, *_ = without_blocks(DOCUMENTS[document]).split("\n\n")
    assert title.startswith("# ") and "\n" not in title
    assert re.match(r"[A-Z*]", opening) and len(opening.split()) >= 8, "say what the page is for and when to read it"
    lines = without_blocks(DOCUMENTS[document]).splitlines()
    assert [line for line in lines if len(line) > (MAX_ROW if line.lstrip().startswith("|") else MAX_COLUMNS)] == []
    heads = [head for head, *_ in tables(re.sub(r"^ +\|", "|", DOCUMENTS[document], flags=re.MULTILINE))]
    assert [head for head in heads if len(head) > MAX_CELLS] == []
