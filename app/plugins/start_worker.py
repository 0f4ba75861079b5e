"""Starts a worker process: `start_worker.py app.reward.worker_main` calls `main` of that module.

The module may import only the standard library, pydantic, and project modules with the same restriction. Before the
call, modules of `app` are removed from `sys.modules`, because the user may have a package of this name.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    source_root = str(Path(__file__).resolve().parents[2])
    sys.path.insert(0, source_root)
    program = importlib.import_module(sys.argv[1])
    sys.path.remove(source_root)
    for name in [name for name in sys.modules if name.split(".")[0] == "app"]:
        del sys.modules[name]
    program.main()
