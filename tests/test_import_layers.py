"""Tests of the import order between packages and of forbidden imports, read from the source."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"grpo"}),
    frozenset({"cli"}),
    frozenset({"app.commands"}),
    frozenset({"app.preflight"}),
    frozenset({"app.training"}),
    frozenset({"app.stages", "app.evaluation", "app.export"}),
    frozenset({"app.tracking"}),
    frozenset({"app.checkpoint"}),
    frozenset({"app.runtime"}),
    frozenset({"app.rollout", "app.score", "app.advantage", "app.update"}),
    frozenset({"app.prompts", "app.batching"}),
    frozenset({"app.model"}),
    frozenset({"app.mesh"}),
    frozenset({"app.environments"}),
    frozenset({"app.reward", "app.report", "app.distributed"}),
    frozenset({"app.plugins"}),
    frozenset({"app.records"}),
    frozenset({"settings"}),
)
"""Layers: a package may import those of later layers; packages of one layer do not import each other."""

LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}

SETTINGS_BELOW_RUNTIME = {
    # The numbers of AdamW and its schedule; a literal.
    "app.update": {"schema.algorithm.OptimizerSettings", "schema.algorithm.ScoredRole"},
    "app.rollout": {
        # The numbers of the policies and of the length of segments; literals; a Ray actor makes a mesh of its own.
        *("schema.rollout.PdsrSettings", "schema.rollout.SegmentSettings", "schema.rollout.KVCacheType"),
        "schema.rollout.PDSR_WINDOW_MIN",
        *("schema.model.Quantization", "schema.mesh.MeshSettings"),
    },
    # Source, split and columns of the data sets; the syntax of their names.
    "app.prompts": {"schema.data.DataSettings", "schema.model.split_revision"},
    # Two literals; the syntax of a model's name.
    "app.model": {
        *("schema.model.AttentionImplementation", "schema.model.Quantization", "schema.model.split_revision"),
    },
    "app.mesh": {
        # Shape, platform and hosts; suggestions for the misspelled name of a slice.
        "schema.mesh.MeshSettings",
        *("loading.fields.did_you_mean", "loading.fields.nearest_names"),
    },
    "app.reward": {
        # The reward functions and the limits of their processes; four names.
        *("schema.reward.RewardSettings", "schema.reward.RewardFunctionSettings", "schema.reward.PluginSettings"),
        *("schema.reward.MODEL_REWARD", "schema.reward.OVERLONG_REWARD", "schema.reward.CALLABLE_PREFIX"),
        "schema.reward.ENVIRONMENT_REWARD",
    },
    # The values of keys, which are never shown.
    "app.plugins": {"loading.secrets.redact", "loading.secrets.redact_also"},
    # The environment and the limits of its processes; the values of keys, which are never shown.
    "app.environments": {
        *("loading.secrets.redact", "schema.reward.EnvironmentSettings", "schema.reward.PluginSettings"),
    },
    # The saved settings of a run, beside the defaults.
    "app.report": {"loading.fields.FIELDS"},
    "app.distributed": {
        # Hosts compare all their settings.
        *("Resolved", "loading.fields.FIELDS", "loading.fields.value_of"),
    },
    "app.records": {
        # The folder of a run, the settings that it saves, and how those of its sessions differ.
        *("schema.run.RunSettings", "Resolved", "loading.printing.from_yaml"),
        *("checks.resumed_settings.SettingChange", "checks.resumed_settings.changed_settings"),
        *("loading.config_file.ConfigFile", "loading.fields.FIELDS"),
    },
}
"""Package below `app.runtime` -> what it imports from `settings` besides `settings.errors`, and why: names, literals,
single sections that serve as small records, and the whole settings only where they are compared or saved."""

JAX_FAMILY = {"jax", "jaxlib", "flax", "optax", "orbax"}

FORBIDDEN_MODULES = {"torch", "pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_NAMES = {
    *("eval", "exec", "__import__", "os.system", "os.popen"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.full_load_all"),
    *("yaml.unsafe_load", "yaml.unsafe_load_all"),
    *("flax.nnx.jit", "flax.nnx.grad", "flax.nnx.value_and_grad", "flax.nnx.scan", "flax.nnx.Optimizer"),
}
FORBIDDEN_UNLESS_FALSE = {"shell", "allow_pickle", "trust_remote_code"}


@dataclass(frozen=True)
class Import:
    line: int
    target: str
    """`a.b.c` for both `import a.b.c` and `from a.b import c`."""
    when_loaded: bool
    """Whether the import runs with the module: not in a function or under `if TYPE_CHECKING`."""


@functools.cache
def find_imports(source: str) -> tuple[Import, ...]:
    def visit(node: ast.AST, when_loaded: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, when_loaded) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (Import(node.lineno, f"{base}.{alias.name}", when_loaded) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else "?"
            yield Import(node.lineno, str(name), when_loaded)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from (found for child in node.body for found in visit(child, False))
            yield from (found for child in node.orelse for found in visit(child, when_loaded))
            return
        inside_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, when_loaded and not inside_function)

    return tuple(visit(ast.parse(source), True))


def package_of(dotted: str) -> str | None:
    """Returns `app.mesh` for `app.mesh.device_mesh.make_mesh`; None for modules of other distributions."""
    first, *rest = dotted.split(".")
    if first == "app":
        return ".".join(["app", *rest[:1]])
    return first if first in {"grpo", "cli", "settings", "tests", "scripts", ""} else None


def layer_violations(module: str, source: str) -> list[str]:
    """Returns the imports of `module` that the layers forbid."""
    if module == "app":
        return [f"line {found.line}: app/__init__.py imports" for found in find_imports(source)]
    here = package_of(module)
    if here not in LAYER_OF:
        return [f"{here} has no place in LAYERS"]
    problems = []
    for found in find_imports(source):
        there = package_of(found.target)
        if there is None or there == here:
            continue
        if there not in LAYER_OF:
            problems.append(f"line {found.line}: {found.target} is not in a package of LAYERS, by its full name")
        elif LAYER_OF[there] <= LAYER_OF[here]:
            problems.append(f"line {found.line}: {here} must not import {there}")
    return problems


def forbidden_uses(source: str) -> list[str]:
    """Returns uses of forbidden names, whatever name they were imported under."""
    tree = ast.parse(source)
    full_names = {}
    problems = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            full_names |= {alias.asname: base + alias.name for alias in node.names if alias.asname}
            if base:
                full_names |= {alias.name: base + alias.name for alias in node.names if not alias.asname}
    for found in find_imports(source):
        if found.target.split(".")[0] in FORBIDDEN_MODULES or found.target in FORBIDDEN_NAMES:
            problems.append(f"line {found.line}: import of {found.target}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            first, dot, rest = ast.unparse(node).partition(".")
            name = full_names.get(first, first) + dot + rest
            if name in FORBIDDEN_NAMES:
                problems.append(f"line {node.lineno}: {name}")
        elif isinstance(node, ast.Call):
            problems += [
                f"line {node.lineno}: {keyword.arg}={ast.unparse(keyword.value)}"
                for keyword in node.keywords
                if keyword.arg in FORBIDDEN_UNLESS_FALSE and ast.unparse(keyword.value) != "False"
            ]
    return problems


def reached(modules: set[str], sources: Mapping[str, str], *, lazily: bool) -> set[str]:
    """Returns the foreign top-level modules that importing `modules` loads; with `lazily`, also those loaded in
    functions."""
    all_modules = reached_modules(modules, sources, lazily=lazily)
    targets = modules.union(
        *(
            [item.target for item in find_imports(sources[module]) if lazily or item.when_loaded]
            for module in all_modules
        )
    )
    return {target.split(".")[0] for target in targets} - {module.split(".")[0] for module in sources}


def reached_modules(modules: set[str], sources: Mapping[str, str], *, lazily: bool) -> set[str]:
    """Returns the modules of the program that importing `modules` loads; with `lazily`, also inside functions."""
    seen: set[str] = set()
    waiting = list(modules)
    while waiting:
        parts = waiting.pop().split(".")
        prefixes = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        for module in prefixes & sources.keys() - seen:
            seen.add(module)
            found = find_imports(sources[module])
            waiting += [item.target for item in found if lazily or item.when_loaded]
    return seen


def program_sources() -> dict[str, str]:
    files = [
        *REPOSITORY.glob("grpo.py"),
        *REPOSITORY.glob("cli.py"),
        *REPOSITORY.glob("app/**/*.py"),
        *REPOSITORY.glob("settings/**/*.py"),
    ]
    return {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in sorted(files)
    }


SOURCES = program_sources()
HOST_ONLY_PACKAGES = {"app.environments", "app.plugins", "app.report", "app.reward", "app.records", "settings"}
HOST_ONLY = {module for module in SOURCES if package_of(module) in HOST_ONLY_PACKAGES}


def test_imports_follow_the_order_of_the_layers() -> None:
    problems = {module: layer_violations(module, source) for module, source in SOURCES.items()}
    assert {module: found for module, found in problems.items() if found} == {}


def test_packages_below_runtime_take_only_small_records_from_the_settings() -> None:
    below = {package for package, layer in LAYER_OF.items() if LAYER_OF["app.runtime"] < layer < LAYER_OF["settings"]}
    used: dict[str | None, set[str]] = {}
    for module, source in SOURCES.items():
        for found in find_imports(source) if package_of(module) in below else ():
            if found.target.startswith("settings.") and not found.target.startswith("settings.errors."):
                used.setdefault(package_of(module), set()).add(found.target.removeprefix("settings."))
    assert used == SETTINGS_BELOW_RUNTIME


def test_nothing_forbidden_is_used() -> None:
    problems = {module: forbidden_uses(source) for module, source in SOURCES.items()}
    assert {module: found for module, found in problems.items() if found} == {}


def test_rewards_reports_records_and_settings_never_reach_jax() -> None:
    assert reached(HOST_ONLY, SOURCES, lazily=True) & JAX_FAMILY == set()


MAX_MODULES_OF_SCORE = 90


def test_scoring_a_file_reaches_neither_rollout_nor_training() -> None:
    modules = reached_modules({"app.stages.score"}, SOURCES, lazily=True)
    packages = {package_of(module) for module in modules}
    assert not packages & {"app.rollout", "app.training", "app.reward", "app.report", "app.checkpoint", "app.update"}
    assert len([module for module in modules if module.startswith("app")]) <= MAX_MODULES_OF_SCORE


IMPURE = {"time", "datetime", "random", "secrets", "threading", "multiprocessing", "concurrent", "asyncio"}


def test_the_scheduler_has_no_jax_clock_threads_or_randomness() -> None:
    core = {module for module in SOURCES if module.startswith("app.rollout.scheduling")}
    assert reached(core, SOURCES, lazily=True) & JAX_FAMILY == set()
    for module in core:
        used = {found.target.split(".")[0] for found in find_imports(SOURCES[module])}
        assert used & IMPURE == set(), module


def test_loading_the_command_line_does_not_reach_jax() -> None:
    assert reached({"cli"}, SOURCES, lazily=False) & JAX_FAMILY == set()


def test_python_agrees_that_jax_stays_out() -> None:
    program = f"import sys, {', '.join(sorted(HOST_ONLY | {'cli'}))}; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    assert not [name for name in JAX_FAMILY if f"'{name}'" in loaded]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("app.score.scorer", "from app.update.step import UpdateStep"),
        ("app.model.decoder", "def build():\n    from app.batching import token_batch"),
        ("app.mesh.device_mesh", "if TYPE_CHECKING:\n    import app.model.decoder"),
        ("app.training.trainer", "from . import learner"),
        ("app.unknown.module", ""),
    ],
)
def test_the_checker_sees_an_import_against_the_order(module: str, source: str) -> None:
    assert len(layer_violations(module, source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def lazy():\n    from torch.nn import Linear",
        "value = eval(text)",
        "import yaml as y\ny.load(text, Loader=y.FullLoader)",
        "subprocess.run(command, shell=flag)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "from flax import nnx\n@nnx.jit\ndef step(): ...",
    ],
)
def test_the_checker_sees_what_is_forbidden(source: str) -> None:
    assert forbidden_uses(source)


def test_the_checker_follows_imports_through_the_program() -> None:
    sources = {
        "app": "",
        "app.reward": "import re",
        "app.reward.gsm8k": "from app.records.jsonl import read_jsonl",
        "app.records.jsonl": "def read_jsonl():\n    import jax\nif TYPE_CHECKING:\n    import flax",
    }
    assert reached({"app.reward.gsm8k"}, sources, lazily=False) == {"re"}
    assert reached({"app.reward.gsm8k"}, sources, lazily=True) == {"re", "jax", "flax"}


KERNELS = {
    *("app.model.kernels.tpu_attention", "app.model.kernels.tpu_decode", "app.rollout.sampling.threshold_kernel"),
    *("app.model.kernels.gpu_attention", "app.model.kernels.gpu_decode", "app.model.kernels.gpu_grouped_product"),
}


def test_kernels_are_loaded_only_by_the_functions_that_run_them() -> None:
    """Pallas is slow to import, and its backends for GPUs and TPUs may not be there on other platforms."""
    loaded = {
        module: [found.target for found in find_imports(source) if found.when_loaded]
        for module, source in SOURCES.items()
    }
    pallas = "jax.experimental.pallas"
    assert {module for module, targets in loaded.items() if any(name.startswith(pallas) for name in targets)} == KERNELS
    reaching = [
        (module, name) for module in loaded for name in KERNELS & reached_modules({module}, SOURCES, lazily=False)
    ]
    assert {module for module, _ in reaching} == KERNELS


def test_the_platform_is_that_of_the_devices_in_use():
    asking = [path for path in (REPOSITORY / "app").rglob("*.py") if "default_backend" in path.read_text()]
    assert asking == []
