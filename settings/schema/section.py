"""The base class of all settings sections."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, field_validator

INT64_LIMIT = 2**63


def as_list(value: Any) -> Any:
    """Returns a single string as a list of one, and any other value unchanged."""
    return [value] if isinstance(value, str) else value


COPYING = "copy files from or to a bucket with `gcloud storage cp` or `aws s3 cp`"
NO_ADDRESS = "expected a local path or a name, not an address"


def refuse_address(value: str) -> str:
    """Returns the value; raises ValueError for an address such as `gs://bucket/file`, which is not a local path."""
    if "://" in value:
        raise ValueError(f"{NO_ADDRESS}; {COPYING}")
    return value


LocalPath = Annotated[str, AfterValidator(refuse_address)]
"""A path or a hub id; the address of a bucket is refused."""


def validate_plugin(value: str, *, built_in: tuple[str, ...] = ()) -> str:
    """Returns the value; raises ValueError unless it is `module:name`, `path/to/file.py:name` or in `built_in`."""
    place, _, attribute = refuse_address(value).rpartition(":")
    is_place = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    if value not in built_in and not (is_place and all(part.isidentifier() for part in attribute.split("."))):
        options = f"one of {', '.join(built_in)}, " if built_in else ""
        raise ValueError(f"expected {options}`module:name` or `path/to/file.py:name`")
    return value


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and not -INT64_LIMIT <= value < INT64_LIMIT:
            raise ValueError("expected a number that fits in 64 bits")
        return value
