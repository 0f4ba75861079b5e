"""Reads the rows of Parquet files as JSON objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.records.typed_values import to_json
from settings.errors import InputError


def read_parquet(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (location, row) for every row: `FILE row INDEX`, from 0, and the row converted by `to_json`.

    Raises:
        InputError: the file cannot be read.
    """
    import pyarrow
    import pyarrow.parquet

    path, index = Path(path), 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield f"{path} row {index}", to_json(row)
                    index += 1
    except FileNotFoundError:
        raise InputError(f"{path.absolute()}: no such file; correct the path") from None
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path.absolute()}: cannot be read as Parquet: {error}; give another file") from error
