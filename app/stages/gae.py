"""`grpo gae`: advantages and returns of a file of samples or matrices, window by window, never all of it in memory."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

from app.mesh import topology
from app.mesh.device_memory import peak_memory_bytes
from app.records.jsonl import check_output_path
from app.records.moments import Moments, whiten
from app.stages.gae_jsonl import GaeSampleFile
from app.stages.gae_npz import GaeMatrixFile
from app.stages.gae_summary import AdvantageTransform, unapplied_settings
from app.tracking.compilation_counter import CompilationCounter
from settings import Resolved
from settings.errors import InputError
from settings.schema.mesh import MeshSettings

NPZ_SUFFIX = ".npz"


def estimate_advantages(resolved: Resolved, *, input: Path, out: Path) -> dict[str, Any]:
    """Writes `input` with advantages and returns to `out`, in the same format, and returns the figures to be shown.

    The file is read once to be checked, before any device work, and once or, to whiten, twice to be estimated.

    Raises:
        InputError: settings, samples, matrices or output file that cannot be used.
    """
    settings = resolved.settings
    kind, kind_of_out = (GaeMatrixFile if path.suffix.lower() == NPZ_SUFFIX else GaeSampleFile for path in (input, out))
    if kind != kind_of_out:
        raise InputError(
            f"--out: expected the format of --input, {input.name}, got {out.name}; name both *{NPZ_SUFFIX} or none"
        )
    check_output_path(out)
    if input.exists() and not input.is_file():
        raise InputError(f"--input: {input} is no file")
    start = time.perf_counter()
    file = kind(input, settings)
    file.check()
    start_local_devices(settings.mesh)
    with closing(CompilationCounter()) as compilations:
        # All advantages are known before the first is whitened.
        over = file.advantage_moments() if settings.algorithm.whiten_advantages else None
        file.write(out, make_whitener(over))
    seconds = time.perf_counter() - start
    figures = file.summary.metrics(settings) | {"whitened": over is not None}
    if over is not None:
        figures["before whitening"] = f"mean {over.mean:.6g}, std {over.population_std:.6g}"
    if notes := unapplied_settings(resolved, file.summary, has_logprobs=file.has_logprobs):
        figures["not applied"] = "; ".join(notes)
    return figures | {
        "compiling seconds": round(compilations.seconds, 2),
        "seconds": round(seconds, 2),
        "tokens/s": round(file.summary.num_tokens / max(seconds, 1e-9)),
        "peak memory MiB": round(peak_memory_bytes() / 2**20),
        "written to": str(out),
    }


def start_local_devices(mesh: MeshSettings) -> None:
    """Starts the devices of this host; whoever else `mesh` names has no part in a file."""
    topology.initialize_local(mesh)


def make_whitener(moments: Moments | None) -> AdvantageTransform:
    """To mean 0 and variance 1 over the file's tokens, or, without moments, as they are."""
    if moments is None:
        return lambda advantages, mask: advantages
    return lambda advantages, mask: whiten(advantages, mask, moments)
