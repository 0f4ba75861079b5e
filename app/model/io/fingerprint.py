"""Fingerprints of model files, computed from small parts of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NUM_SPOTS, SPOT_BYTES = 4, 4096
"""The parts of each tensor that are read: 5 MB of a model with 300 tensors."""

ByteRanges = Mapping[str, range]
"""The byte range of each tensor in its file, by name, type and shape."""


def fingerprint(config: Mapping[str, Any], files: Mapping[Path, ByteRanges]) -> str:
    """Returns the hex SHA-256 of a configuration and of each file's name, size, and tensor names, places and spots.

    Spots are the first and the last 4 KiB of a tensor and two between them; tensors up to 16 KiB are read whole. So a
    change of a whole tensor is detected; a change of a few numbers between the spots is not.
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
    """Returns the byte ranges of a file that the safetensors library has opened, and so verified to be whole.

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
