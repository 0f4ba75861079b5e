"""Fingerprints of model files, computed from small parts of each tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NUM_SPOTS, SPOT_BYTES = 4, 4096
"""Number and size of the spots read from each tensor: 5 MB in total for a model with 300 tensors."""

ByteRanges = Mapping[str, range]
"""The byte range of each tensor in its file, by name, type and shape."""


def fingerprint(config: Mapping[str, Any], files: Mapping[Path, ByteRanges]) -> str:
    """Returns the hex SHA-256 of a configuration and of each file's name, size, tensor names, byte ranges and spots.

    Spots are the first and the last 4 KiB of a tensor and two between them; tensors up to 16 KiB are read whole. So
    changes to a whole tensor are detected, but not changes to a few numbers between the spots.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path, extents in files.items():
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with path.open("rb") as file:
            for name, extent in extents.items():
                digest.update(f"{name}:{extent.start}:{extent.stop}".encode())
                for spot in _spots(extent):
                    file.seek(spot.start)
                    digest.update(file.read(len(spot)))
    return digest.hexdigest()


def _spots(extent: range) -> Iterator[range]:
    if len(extent) <= NUM_SPOTS * SPOT_BYTES:
        yield extent
        return
    for place in range(NUM_SPOTS):
        start = (len(extent) - SPOT_BYTES) * place // (NUM_SPOTS - 1)
        yield extent[start : start + SPOT_BYTES]


def safetensors_byte_ranges(path: Path) -> ByteRanges:
    """Returns the byte ranges of the tensors in a file that the safetensors library has verified by opening it.

    Source: the safetensors format, https://huggingface.co/docs/safetensors.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        f"{name}:{tensor['dtype']}:{tensor['shape']}": range(*(8 + length + at for at in tensor["data_offsets"]))
        for name, tensor in header.items()
        if name != "__metadata__"
    }
