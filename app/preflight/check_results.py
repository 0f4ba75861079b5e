"""What a look at a machine and its settings has found: a table for a person, an exit code for a script."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax

from app.records.printable import to_printable
from settings.errors import InputError
from settings.loading.secrets import redact

Verdict = Literal["ok", "warn", "fail", "skip"]
"""As it should be; a run would go on, but not as somebody may expect; a run would not start, or would end early; not
looked at, for want of something else."""
EXIT_ENVIRONMENT, EXIT_INPUT = 1, 2
"""Exit codes of what fails: of the surroundings; of settings and of what they name."""
MAX_WIDTH, MIN_WIDTH = 140, 60


@dataclass(frozen=True)
class CheckResult:
    """What one check has found."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""
    exit_code: int = 0
    """What a run would end with for it: 0 unless it fails."""
    host: int = 0

    def to_lines(self, *, name_width: int, width: int) -> Iterator[str]:
        """Of a table whose first column is `named` wide."""
        head = f"{self.name:<{name_width}}  {self.verdict:<6}  "
        margin = " " * len(head)
        text = [to_printable(line) for line in self.found.splitlines() or [""]]
        text += [f"-> {to_printable(line)}" for line in self.advice.splitlines()]
        wrapped = [part for line in text for part in textwrap.wrap(line, max(width - len(head), MIN_WIDTH)) or [""]]
        for number, line in enumerate(wrapped):
            yield f"{margin if number else head}{line}".rstrip()

    @property
    def name(self) -> str:
        return f"{self.check} (host {self.host})" if self.host else self.check


class CheckRecorder:
    """Collects them in order. What one check raises does not keep the next from being made."""

    def __init__(self) -> None:
        self.results: list[CheckResult] = []

    def ok(self, check: str, message: str) -> None:
        self._add(check, "ok", message)

    def warn(self, check: str, message: str, advice: str) -> None:
        self._add(check, "warn", message, advice)

    def fail(self, check: str, message: str, advice: str = "", *, exit_code: int) -> None:
        self._add(check, "fail", message, advice, exit_code)

    def skip(self, *checks: str, reason: str) -> None:
        for check in checks:
            self._add(check, "skip", reason)

    def _add(self, check: str, verdict: Verdict, message: str, advice: str = "", exit_code: int = 0) -> None:
        # A library's message may quote a key.
        self.results.append(CheckResult(check, verdict, redact(message), redact(advice), exit_code))

    @contextmanager
    def run_check(self, check: str) -> Iterator[None]:
        """Whatever is raised inside is what the check has found."""
        try:
            yield
        except InputError as error:
            self.fail(check, str(error), exit_code=EXIT_INPUT)
        # Blanket, because whatever it is, a run would meet it, too, and there is more to look at.
        except Exception as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
                # Maybe another host has died; nothing that hosts do together would end.
                raise
            self.fail(check, f"{type(error).__name__}: {error}", exit_code=EXIT_ENVIRONMENT)


@dataclass(frozen=True)
class DoctorReport:
    """All that was found, on all hosts."""

    results: Sequence[CheckResult]
    seconds: float
    host: int = 0
    """That tells it; the first prints it."""

    @property
    def exit_code(self) -> int:
        """0 where no check fails; 2 where settings or what they name cannot be used, whatever else fails; else 1."""
        return max((finding.exit_code for finding in self.results), default=0)

    @property
    def failed_checks(self) -> Sequence[str]:
        return [finding.name for finding in self.results if finding.verdict == "fail"]

    def to_dict(self) -> dict[str, Any]:
        checks = [asdict(finding) for finding in self.results]
        return {"checks": checks, "seconds": round(self.seconds, 2), "exit_code": self.exit_code}

    def to_text(self) -> str:
        width = min(shutil.get_terminal_size((MAX_WIDTH, 0)).columns, MAX_WIDTH)
        named = max(len(name) for name in ("check", *(finding.name for finding in self.results)))
        lines = [f"{'check':<{named}}  {'result':<6}  found, and -> what to do"]
        lines += [line for finding in self.results for line in finding.to_lines(name_width=named, width=width)]
        return "\n".join([*lines, "", f"{count_verdicts(self.results)} in {self.seconds:.1f} s"])


def count_verdicts(results: Iterable[CheckResult]) -> str:
    """`9 ok, 1 warn`."""
    verdicts = [finding.verdict for finding in results]
    kinds: tuple[Verdict, ...] = ("ok", "warn", "fail", "skip")
    return ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds if kind in verdicts)
