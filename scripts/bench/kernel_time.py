"""Estimates the time of Pallas kernels on a TPU from the instructions that the compiler scheduled for them."""

from __future__ import annotations

import atexit
import base64
import functools
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.interpreters.mlir import make_ir_context
from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu

from app.mesh.chips import TpuChip
from app.model.attention.dense import ATTENTION_SCOPE
from app.preflight.hlo_text import ArrayShape, Instruction
from settings.errors import InputError

GROUPED_PRODUCTS = ("ragged-dot-none", "tgmm")
"""Names of the kernels that `app.model.grouped_product` uses: XLA's ragged dot, and tgmm of megablox."""
SCHEDULES = ".*final_bundles.*"
"""Regular expression of the compiler passes whose dumps contain the scheduled instructions of Pallas kernels."""
ROUTED_ROWS = "routed rows"
"""Key in `turns` of the number of rows that are routed to the experts of a device."""


@functools.cache
def kernel_schedules() -> Path:
    """Makes libtpu write the schedule of each kernel that it compiles to a temporary folder, and returns the folder.

    The first call must be before JAX loads libtpu.
    """
    folder = tempfile.mkdtemp(prefix="grpo-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # libtpu splits the variable at spaces and does not support quotes.
    added = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={SCHEDULES}"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {added}".strip()
    return Path(folder)


def kernel_time(one: Instruction, chip: TpuChip, bundles: Mapping[str, int], turns: Mapping[str, int]) -> float:
    """Returns the estimated seconds of a kernel: the larger of the times of its instructions and of its copies.

    Each grid step takes one clock cycle per instruction bundle.

    Args:
        bundles: number of bundles per kernel; see `take_scheduled_bundles`.
        turns: sizes of grids that depend on data: the number of block pairs under the key `ATTENTION_SCOPE`, and the
            number of rows under `ROUTED_ROWS`.

    Raises:
        InputError: the schedule of the kernel is missing.
    """
    kernel = one.name.partition(".")[0]
    if kernel not in bundles:
        raise InputError(
            f"libtpu wrote no schedule of the kernel {kernel}, so its time is unknown: unset "
            "JAX_COMPILATION_CACHE_DIR, and use the libtpu that this JAX requires (pip install -e '.[tpu]')"
        )
    num_turns, num_bytes = _turns_and_copies(one, turns)
    return max(bundles[kernel] * num_turns / chip.clock_hz, num_bytes / chip.hbm_bytes_per_s)


def take_scheduled_bundles(folder: Path) -> dict[str, int]:
    """Maps the name of each kernel compiled since the last call to its number of VLIW instruction bundles.

    If several kernels have the same name, the longest counts.
    """
    bundles: dict[str, int] = {}
    for path in folder.iterdir():
        name = re.fullmatch(r"\d+-([\w-]+?)(?:\.[.\w]*)?-\d+-schedule-analysis_final_bundles\.txt", path.name)
        if name and '"tpu_custom_call"' in (text := path.read_text(errors="replace")):
            total = re.search(r"total scheduled bundles:\s+(\d+)", text)
            assert total, path
            bundles[name[1]] = max(int(total[1]), bundles.get(name[1], 0))
        path.unlink()
    return bundles


def _turns_and_copies(one: Instruction, turns: Mapping[str, int]) -> tuple[int, int]:
    """Returns the number of grid steps of a kernel, and the maximum number of bytes that it copies from or to HBM.

    A block is copied whenever the innermost index that selects it changes. Blocks without double buffering stay in VMEM
    for many grid steps and are not counted.
    """
    body = one.attribute(r'"body":"([^"]+)"')
    assert body, one.name
    with make_ir_context() as context:
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(base64.b64decode(body))
        [kernel, *others] = module.body.operations
        functions = {ir.StringAttr(index.attributes["sym_name"]).value: index for index in others}
        attributes: Any = kernel.attributes
        if "iteration_bounds" not in attributes:  # a single turn
            return 1, one.num_bytes
        bounds, num_prefetched = list(attributes["iteration_bounds"]), int(attributes["scalar_prefetch"])
        arguments = list(kernel.regions[0].blocks[0].arguments)[len(bounds) :]
        arrays = arguments[num_prefetched:]
        grid = [_dynamic_turns(one, arguments[0], arrays[0], turns) if size < 0 else size for size in bounds]
        num_bytes = 0
        for array, window in zip(arrays, attributes["window_params"], strict=False):
            if "pipeline_mode" not in window or "double_buffered" in str(window["pipeline_mode"]):
                selects = functions[window["transform_indices"].value].regions[0].blocks[0].arguments
                used = [dim for dim in range(len(grid)) if list(selects[dim].uses)]
                num_bytes += _block(array).num_bytes * math.prod(grid[: max(used, default=-1) + 1])
    return math.prod(grid), num_bytes


def _dynamic_turns(one: Instruction, prefetched: Any, rows: Any, turns: Mapping[str, int]) -> int:
    """Returns the size of a grid dim that depends on data.

    A grouped matmul has one step per block of rows, and another step for each group that starts within a block.
    """
    if not one.name.startswith(GROUPED_PRODUCTS):
        return turns[ATTENTION_SCOPE]
    num_rows, num_groups = turns[ROUTED_ROWS], _block(prefetched).sizes[0] - 1
    return -(-num_rows // _block(rows).sizes[0]) + max(min(num_groups, num_rows) - 1, 0)


def _block(array: Any) -> ArrayShape:
    sizes, dtype = re.findall(r"memref<((?:\d+x)*)(\w+)", str(array.type))[0]
    return ArrayShape(dtype, tuple(map(int, sizes.split("x")[:-1])), 0)
