"""The base class of all settings sections."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, field_validator

INT64_LIMIT = 2**63


def as_list(value: Any) -> Any:
    """Accepts a single string in place of a list."""
    return [value] if isinstance(value, str) else value


COPYING = "`gcloud storage cp` and `aws s3 cp` copy from and to buckets"
NO_ADDRESS = f"expected a local path, or a name, instead of an address ({COPYING})"


def refuse_address(value: str) -> str:
    """Refuses addresses such as `gs://bucket/file`, which a path would turn into a local folder `gs:`."""
    if "://" in value:
        raise ValueError(NO_ADDRESS)
    return value


LocalPath = Annotated[str, AfterValidator(refuse_address)]
"""A path or a hub id; the address of a bucket is refused."""


def validate_plugin(value: str, *, built_in: tuple[str, ...] = ()) -> str:
    """Accepts `module:name`, `path/to/file.py:name` and the names in `built_in`."""
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
