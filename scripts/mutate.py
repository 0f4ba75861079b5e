"""Shows which random faults in the program the tests detect. It takes minutes to hours.

python scripts/mutate.py --packages update advantage --faults 20 > new.jsonl
python scripts/mutate.py --packages update advantage --faults 20 --tests ../other/tests > other.jsonl

A fault changes an operator, a constant, a condition, a name or a result, or removes a call. The same code and seed
always give the same faults. Each is applied to a copy of the working tree, where the fast tests of the package
(`tests/PACKAGE`) run until one fails. The script prints one JSON object per fault, whose result is `caught`, `survived`
or `timed out`. Not every survivor is a gap in the tests: some faults do not change the behaviour.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
FAST = "not slow and not two_hosts and not compile"


def both_ways(pairs: dict) -> dict:
    return pairs | {second: first for first, second in pairs.items()}


OPERATORS = both_ways(
    {ast.Add: ast.Sub, ast.Mult: ast.Div, ast.And: ast.Or, ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq}
    | {ast.Is: ast.IsNot, ast.In: ast.NotIn}
)
EXTREMES = both_ways({"min": "max", "minimum": "maximum", "argmin": "argmax", "any": "all"})
ROLES = both_ways({"policy": "reference", "prompt": "completion", "prompts": "completions", "fast": "heavy"})
"""Maps a part of a name to its replacement in a fault; the file must already contain the resulting name."""
PLACE = ("package", "file", "line", "before", "after")


class Fault(NamedTuple):
    """The replacement of the bytes `start` to `end` of a file with `text`; `before` and `after` show the line."""

    package: str
    file: str
    line: int
    before: str
    after: str
    start: int
    end: int
    text: bytes

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text + source[self.end :]


def find_faults(source: bytes, *, package: str, file: str) -> list[Fault]:
    """Returns all possible faults of a file, in the order of their positions."""
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    names = {getattr(node, field, "") for node in ast.walk(tree) for field in ("id", "attr", "arg")}
    faults = []
    for node, other in (change for place in program_nodes(tree) for change in changes(place, names)):
        text = (other if isinstance(other, str) else f"({ast.unparse(other)})").encode()
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        start = sum(map(len, lines[:first])) + node.col_offset
        end = sum(map(len, lines[: last - 1])) + (node.end_col_offset or 0)
        before = b" ".join(line.strip() for line in lines[first:last]).decode()
        after = (source[:start] + text + source[end:]).splitlines()[first].strip().decode()
        faults.append(Fault(package, file, node.lineno, before, after, start, end, text))
    return sorted(faults, key=lambda fault: (fault.start, fault.end, fault.text))


def program_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes in which faults are made: all except types, assertions and f-strings, which are messages."""
    is_type = isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"
    if is_type or isinstance(node, ast.JoinedStr | ast.Assert):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from program_nodes(child)


def changes(node: ast.AST, names: Set[str]) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | str]]:
    """Yields (node to replace, replacement) for each fault at a node; `names` are all names in the file."""
    match node:
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS and not (is_text(left) or is_text(right)):
            yield node, ast.BinOp(left, OPERATORS[type(operator)](), right)
        case ast.BoolOp(operator, values):
            yield node, ast.BoolOp(OPERATORS[type(operator)](), values)
        case ast.Compare(left, operators, right):
            for i, operator in enumerate(operators):
                if type(operator) in OPERATORS:
                    changed = [*operators[:i], OPERATORS[type(operator)](), *operators[i + 1 :]]
                    yield node, ast.Compare(left, changed, right)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield node, operand
        case ast.Constant(bool(value)):
            yield node, str(not value)
        case ast.Constant(int(value) | float(value)):
            yield from ((node, repr(other)) for other in ([0, 2] if value == 1 else [value + 1]))
        case ast.Constant(str(value)) if value in ROLES:
            yield node, repr(ROLES[value])
        case ast.Slice(lower, upper):
            bounds = [bound for bound in (lower, upper) if bound and not isinstance(bound, ast.Constant)]
            yield from ((bound, ast.BinOp(bound, ast.Add(), ast.Constant(1))) for bound in bounds)
        case ast.Name(name, ast.Load()):
            yield from ((node, other) for other in swapped_names(name, names))
        case ast.Attribute(value, name, ast.Load() as context):
            yield from ((node, ast.unparse(ast.Attribute(value, x, context))) for x in swapped_names(name, names))
        case ast.Expr(ast.Call()):
            yield node, "pass"
        case ast.Break() | ast.Continue():
            yield node, "continue" if isinstance(node, ast.Break) else "break"
        case ast.Return(ast.expr() as value) if ast.unparse(value) != "None":
            yield node, "return None"


def swapped_names(name: str, names: Set[str]) -> list[str]:
    parts = name.split("_")
    swapped = ("_".join([*parts[:i], ROLES.get(part, part), *parts[i + 1 :]]) for i, part in enumerate(parts))
    return [EXTREMES[name]] if name in EXTREMES else [other for other in swapped if other != name and other in names]


def is_text(node: ast.expr) -> bool:
    """Returns whether a node is a string; another operator than `+` or `/` would then always raise TypeError."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def all_faults(package: str) -> list[Fault]:
    folder = REPOSITORY / (package if package == "settings" else f"app/{package}")
    files = {path.relative_to(REPOSITORY).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.py"))}
    return [fault for name, source in files.items() for fault in find_faults(source, package=package, file=name)]


def draw_faults(package: str, *, num_faults: int, seed: int) -> list[Fault]:
    faults = all_faults(package)
    return random.Random(f"{seed} {package}").sample(faults, min(num_faults, len(faults)))


def survivors_of(output: Path) -> list[Fault]:
    """Returns the faults that survived in an earlier output, if they are still possible in the code."""
    records = [json.loads(line) for line in output.read_text().splitlines()]
    places = {tuple(one[name] for name in PLACE) for one in records if one["result"] == "survived"}
    packages = sorted({package for package, *_ in places})
    return [fault for package in packages for fault in all_faults(package) if fault[: len(PLACE)] in places]


def copy_tree(target: Path, tests: Path) -> None:
    """Copies the files that git does not ignore to `target`, and the folder `tests` as `tests/`."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in names:
        if not name.startswith("tests/") and (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)
    shutil.copytree(tests, target / "tests", ignore=shutil.ignore_patterns("__pycache__"))


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Ends a process group: first by SIGINT, so that pytest can end the processes that tests have started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_tests(tree: Path, folders: Sequence[str], *, limit_s: float) -> dict[str, str | float | None]:
    """Runs tests until one fails; returns the result (such as `caught`), the first failed test and the seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", FAST, *folders]
    environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "CI": "true"}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        tests = subprocess.Popen(command, cwd=tree, env=environ, stdout=said, stderr=said, start_new_session=True)
        try:
            code = tests.wait(limit_s)
            # With 2, a test module cannot be imported. Other codes, as after running out of memory, prove nothing.
            result = {0: "survived", 1: "caught", 2: "caught"}.get(code, f"ended with {code}")
        except subprocess.TimeoutExpired:
            result = "timed out"
        finally:
            end_session(tests)
        said.seek(0)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said.read(), re.MULTILINE)
    return {"result": result, "first_failing_test": failed and failed[1], "seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="+", default=[], help="folders of app/, or settings")
    parser.add_argument("--faults", type=int, default=10, help="number of faults in each package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", type=Path, default=REPOSITORY / "tests", help="another version of tests/")
    parser.add_argument("--also", nargs="+", default=[], help="further folders of tests, such as tests/golden")
    parser.add_argument("--limit", type=float, default=600, help="seconds that the tests of a fault may take")
    parser.add_argument("--only", type=Path, help="an earlier output, whose surviving faults are tried again")
    chosen = parser.parse_args()
    if chosen.only and chosen.packages:
        parser.error("--only already selects the faults; omit --packages")
    drawn = (draw_faults(name, num_faults=chosen.faults, seed=chosen.seed) for name in chosen.packages)
    faults = survivors_of(chosen.only) if chosen.only else [fault for of_package in drawn for fault in of_package]
    if not faults:
        parser.error("no fault to try: name a package with code in --packages, or an output with survivors in --only")
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        tree = Path(folder) / "program"
        copy_tree(tree, chosen.tests)
        for package in dict.fromkeys(fault.package for fault in faults):
            folders = [name for name in (f"tests/{package}", *chosen.also) if (tree / name).exists()]
            # Without an existing folder, all tests of the project would run.
            if not folders:
                sys.exit(f"{package}: there are no tests/{package}; name their folder with --also")
            without_fault = run_tests(tree, folders, limit_s=chosen.limit)
            if without_fault["result"] != "survived":
                sys.exit(f"{package}: the tests do not pass without a fault: {without_fault}")
            for fault in (fault for fault in faults if fault.package == package):
                path = tree / fault.file
                source = path.read_bytes()
                path.write_bytes(fault.apply(source))
                record = dict(zip(PLACE, fault, strict=False)) | run_tests(tree, folders, limit_s=chosen.limit)
                path.write_bytes(source)
                print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
