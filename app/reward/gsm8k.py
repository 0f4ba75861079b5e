r"""Rewards for grade-school mathematics: correctness and format of the final number.

An answer is marked as `#### n`, as in GSM8K, or `\boxed{n}`. The last mark counts. A mark without a number, such as the
Markdown heading `#### Step by step`, is ignored.

Correctness uses the marked answer, or else the last number of the completion ("flexible extract" in
lm-evaluation-harness). Format requires a mark ("strict match"), so a correct answer without a mark gets only the reward
for correctness.
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
    to_ascii,
)

_HASHES = re.compile(rf"####[ \t*]*+(?P<number>{NUMBER_PATTERN})")
_BOX = re.compile(r"\\boxed[ ]?\{(?P<content>(?:[^{}]++|\{[^{}]*+\})*+)\}")
# A number, with an optional name before it (`x =`) and units after it (`dollars`, `miles/hour`, `cm^2`).
_BOX_CONTENT = re.compile(
    rf"(?:[^\W\d]\w*+\s*+=\s*+)?(?P<number>{NUMBER_PATTERN})"
    r"\s*+(?:\\?%)?[\s.]*+(?:(?:[^\W\d_]|[/°])++(?:\^\{?[23]\}?)?[\s.]*+)*+"
)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{([^{}]*+)\}")
_SPACING_COMMAND = re.compile(r"\\[,;:! ]|~")


def extract(completion: str) -> str | None:
    """Returns the text of the number marked as the answer, else of the completion's last number, else None."""
    return extract_marked(completion) or last_number(completion)


def extract_marked(completion: str) -> str | None:
    r"""Returns the text of the number in the last `#### n` or `\boxed{n}`, or None."""
    completion = to_ascii(completion[-MAX_SEARCHED_CHARACTERS:])
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
    """Returns the exact value of a reference answer: a GSM8K solution ending in `#### n`, or a number."""
    return parse_number(extract_marked(answer) or answer)


def is_formatted(completion: str) -> bool:
    """Returns whether a number is marked as the answer in the completion."""
    return extract_marked(completion) is not None
