"""What an environment is, for the program and for those who write one."""

from __future__ import annotations

from typing import Any, NamedTuple


class ToolCall(NamedTuple):
    """A call of a tool that the policy wrote."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None
    """Why it is malformed, for the policy to read; `name` and `arguments` may then be empty."""
