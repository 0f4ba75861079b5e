r"""Grade-school mathematics: is the final number right, and is it marked as the answer?

An answer is marked as `#### n` (GSM8K's own way) or `\boxed{n}`. The last mark counts; a mark that
holds no number, such as the Markdown heading `#### Step by step`, is no mark.

Correctness reads the marked answer or, where there is none, the last number of the completion
(what lm-evaluation-harness calls "flexible extract"). Format asks for a mark ("strict match").
So a right answer without a mark earns the first and not the second.
"""

from __future__ import annotations

import re
from fractions import Fraction

from app.reward.numbers import (
    MAX_NUMBER_CHARACTERS,
    MAX_SEARCHED_CHARACTERS,
    NUMBER_PATTERN,
    last_number,
    parse_number,
)

_HASHES = re.compile(rf"####[ \t*]*+(?P<number>{NUMBER_PATTERN})")
_BOX = re.compile(r"\\boxed[ ]?\{(?P<content>(?:[^{}]++|\{[^{}]*+\})*+)\}")
# One number; before it at most a name (`x =`), after it at most units (`dollars`, `miles/hour`, `cm^2`).
_BOX_CONTENT = re.compile(
    rf"(?:[A-Za-z]\w*+\s*+=\s*+)?(?P<number>{NUMBER_PATTERN})"
    r"\s*+(?:\\?%)?[\s.]*+(?:[A-Za-z/°]++(?:\^\{?[23]\}?)?[\s.]*+)*+"
)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{([^{}]*+)\}")
_SPACING_COMMAND = re.compile(r"\\[,;:! ]|~")


def extract(completion: str) -> str | None:
    """The number that a completion gives as its answer, marked or last, as it is written; or None."""
    return extract_marked(completion) or last_number(completion)


def extract_marked(completion: str) -> str | None:
    r"""The number in the last `#### n` or `\boxed{n}`, as it is written; or None."""
    completion = completion[-MAX_SEARCHED_CHARACTERS:]
    marked = [(match.start(), match["number"]) for match in _HASHES.finditer(completion)]
    for match in _BOX.finditer(completion):
        if (number := _number_in_box(match["content"])) is not None:
            marked.append((match.start(), number))
    by_place = (number for _, number in sorted(marked, reverse=True))
    return next((number for number in by_place if parse_number(number) is not None), None)


def _number_in_box(content: str) -> str | None:
    if len(content) > MAX_NUMBER_CHARACTERS:
        return None
    content = _SPACING_COMMAND.sub("", content.replace("{,}", ","))
    match = _BOX_CONTENT.fullmatch(_TEXT_COMMAND.sub(r"\1", content).strip())
    return match["number"] if match else None


def parse_reference(answer: str) -> Fraction | None:
    """The exact value of a reference answer: a GSM8K solution ending in `#### n`, or just a number."""
    return parse_number(extract_marked(answer) or answer)


def is_formatted(completion: str) -> bool:
    """Whether the completion marks a number as its answer."""
    return extract_marked(completion) is not None
