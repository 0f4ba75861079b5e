"""Results of the preflight checks: a table for people and an exit code for scripts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import jax

from app.records.text_format import format_table, to_printable
from settings.errors import InputError
from settings.secrets import redact

CheckVerdict = Literal["ok", "warn", "fail", "skip"]
"""`warn`: a run would work, but maybe not as expected. `fail`: a run would not start, or would end early. `skip`: the
check did not run, because something it needs is missing."""
EXIT_ENVIRONMENT, EXIT_INPUT = 1, 2
"""Exit codes for a problem with the environment, and for settings or files that cannot be used."""
MAX_WIDTH, MIN_WIDTH = 140, 80


@dataclass(frozen=True)
class CheckResult:
    """Result of one check on one host."""

    check: str
    verdict: CheckVerdict
    found: str
    advice: str = ""
    exit_code: int = 0
    """Exit code of a run that fails for this reason; 0 unless the check fails."""
    host: int = 0

    @property
    def name(self) -> str:
        """Name of the check, with the host unless it is process 0."""
        return f"{self.check} (host {self.host})" if self.host else self.check


class CheckRecorder:
    """Collects the results of checks in order."""

    def __init__(self) -> None:
        self.results: list[CheckResult] = []

    def ok(self, check: str, message: str) -> None:
        self._add(check, "ok", message)

    def warn(self, check: str, message: str, advice: str) -> None:
        self._add(check, "warn", message, advice)

    def fail(self, check: str, message: str, advice: str = "", *, exit_code: int = EXIT_ENVIRONMENT) -> None:
        self._add(check, "fail", message, advice, exit_code)

    def skip(self, *checks: str, reason: str) -> None:
        for check in checks:
            self._add(check, "skip", reason)

    def _add(self, check: str, verdict: CheckVerdict, message: str, advice: str = "", exit_code: int = 0) -> None:
        # A library's message may contain a secret key.
        self.results.append(CheckResult(check, verdict, redact(message), redact(advice), exit_code))

    @contextmanager
    def run_check(self, check: str, advice: str = "") -> Iterator[None]:
        """Returns a context manager that records an exception as a failure of `check`, so that later checks still run.

        `advice` is added unless the exception is an InputError, whose message already says what to do.
        """
        try:
            yield
        except InputError as error:
            self.fail(check, str(error), exit_code=EXIT_INPUT)
        # Catches every exception: a run would raise it as well, and the other checks should still run.
        except Exception as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
                # Another host may have died, and any further collective would hang.
                raise
            self.fail(check, f"{type(error).__name__}: {error}", advice)


@dataclass(frozen=True)
class DoctorReport:
    """Results of all checks on all hosts."""

    results: Sequence[CheckResult]
    seconds: float
    host: int = 0
    """Index of this host; only process 0 prints the report."""

    @property
    def exit_code(self) -> int:
        """0 if no check fails; 2 if a failed check concerns settings or input files; otherwise 1."""
        return max((result.exit_code for result in self.results), default=0)

    @property
    def failed_checks(self) -> Sequence[str]:
        return [result.name for result in self.results if result.verdict == "fail"]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a dict that can be written as JSON."""
        checks = [asdict(result) for result in self.results]
        return {"checks": checks, "seconds": round(self.seconds, 2), "exit_code": self.exit_code}

    def to_text(self) -> str:
        """Returns the report as a readable table, as wide as the terminal."""
        width = max(MIN_WIDTH, min(shutil.get_terminal_size((MAX_WIDTH, 0)).columns, MAX_WIDTH))
        rows = []
        for result in self.results:
            lines = [*result.found.splitlines(), *(f"-> {line}" for line in result.advice.splitlines())]
            rows.append((result.name, result.verdict, "\n".join(map(to_printable, lines))))
        header = ("check", "result", "finding, and -> advice")
        table = format_table(rows, header=header, num_left=3, width=width)
        verdicts = [result.verdict for result in self.results]
        counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in get_args(CheckVerdict) if kind in verdicts)
        return f"{table}\n\n{counts} in {self.seconds:.1f} s"
