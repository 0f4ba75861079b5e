"""`grpo gae`: computes advantages and returns, and adds them to a file of samples or matrices."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32

from app.mesh import jax_startup
from app.mesh.devices import global_devices, peak_memory_bytes
from app.mesh.program_cache import CompilationCounter
from app.records.jsonl import check_output_path
from app.records.moments import EMPTY_MOMENTS, Moments, compute_moments, merge_moments, whiten
from app.stages.gae_jsonl import GaeSampleFile
from app.stages.gae_npz import GaeMatrixFile
from settings import Settings
from settings.errors import InputError
from settings.schema.mesh import MeshSettings

NPZ_SUFFIX = ".npz"


@dataclass
class WrittenAdvantages:
    """Whitens advantages before they are written, and accumulates the moments of what is written."""

    whitening: Moments | None
    """Moments of all advantages in the file, with which they are whitened; None = no whitening."""
    advantages: Moments = EMPTY_MOMENTS
    returns: Moments = EMPTY_MOMENTS

    def __call__(
        self,
        advantages: Float32[np.ndarray, "*any"],
        returns: Float32[np.ndarray, "*any"],
        mask: Bool[np.ndarray, "*any"],
    ) -> Float32[np.ndarray, "*any"]:
        """Returns the advantages to write: whitened if `whitening` is not None."""
        if self.whitening is not None:
            advantages = whiten(advantages, mask, self.whitening)
        self.advantages = merge_moments([self.advantages, compute_moments(advantages, mask)])
        self.returns = merge_moments([self.returns, compute_moments(returns, mask)])
        return advantages


def estimate_advantages(settings: Settings, *, input: Path, out: Path, backend: str, mask_mode: str) -> dict[str, Any]:
    """Adds advantages and returns to `input`, writes it to `out` in the same format, and returns the summary to print.

    The whole input is checked before any device work. Samples are read again for each pass; whitening adds a pass.

    Raises:
        InputError: the settings, samples, matrices or output file cannot be used.
    """
    if is_npz(input) != is_npz(out):
        raise InputError(
            f"--out: expected the format of --input, {input.name}, got {out.name}; both or neither must end in "
            f"{NPZ_SUFFIX}"
        )
    check_output_path(out, "--out")
    start = time.perf_counter()
    file = open_input(input, settings, backend=backend, mask_mode=mask_mode)
    num_rows, num_tokens, num_trainable = file.check()
    if num_tokens and not num_trainable:
        raise InputError(
            f"--input: {input}: the mask is False at every token of all {file.ROW_NAME}, so no token gets an "
            "advantage; set it to true where the policy wrote a token"
        )
    start_local_devices(settings.mesh)
    with closing(CompilationCounter()) as compilations:
        # Whitening needs the moments of all advantages first.
        moments = None
        if settings.algorithm.whiten_advantages:
            moments = merge_moments(compute_moments(advantages, mask) for advantages, _, mask in file.estimates())
        written = WrittenAdvantages(moments)
        file.write(out, written)
    seconds = time.perf_counter() - start
    algorithm, adaptive = settings.algorithm, settings.algorithm.length_adaptive_lam
    return {
        file.ROW_NAME: num_rows,
        "tokens": num_tokens,
        "trainable tokens": num_trainable,
        "gamma": algorithm.gamma,
        "lambda": algorithm.lam if adaptive is None else f"1 - 1 / ({adaptive} x tokens)",
        **({} if settings.critic.lam is None else {"lambda of returns": settings.critic.lam}),
        "mask mode": mask_mode,
        "backend": backend,
        "mean advantage": round(written.advantages.mean, 6),
        "std of advantages": round(written.advantages.population_std, 6),
        "mean return": round(written.returns.mean, 6),
        "std of returns": round(written.returns.population_std, 6),
        "whitened": moments is not None,
        **({"before whitening": f"mean {moments.mean:.6g}, std {moments.population_std:.6g}"} if moments else {}),
        "compiling seconds": round(compilations.seconds, 2),
        "seconds": round(seconds, 2),
        "tokens/s": round(num_tokens / max(seconds, 1e-9)),
        "peak memory MiB": round(peak_memory_bytes() / 2**20),
        "written to": str(out),
    }


def is_npz(path: Path) -> bool:
    return path.suffix.lower() == NPZ_SUFFIX


def open_input(
    path: Path, settings: Settings, *, backend: str = "numpy", mask_mode: str = "skip"
) -> GaeMatrixFile | GaeSampleFile:
    """Returns the reader of `--input`.

    Raises:
        InputError: the path is not a file.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"--input: {path} is not a file; give a file written by grpo score, or a {NPZ_SUFFIX} file")
    return (GaeMatrixFile if is_npz(path) else GaeSampleFile)(path, settings, backend=backend, mask_mode=mask_mode)


def start_local_devices(mesh: MeshSettings) -> None:
    """Starts only the devices of this host, even if `mesh.*` is for several hosts."""
    jax_startup.initialize_local(mesh)
    global_devices(mesh)
