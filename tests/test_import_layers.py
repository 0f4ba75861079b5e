"""Tests of the import order between packages and of forbidden imports, read from the source."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.program import REPOSITORY

LAYERS = tuple(
    frozenset(packages.split())
    for packages in (
        "grpo",
        "cli",
        "app.commands",
        "app.preflight",
        "app.training",
        "app.stages app.evaluation app.export",
        "app.tracking",
        "app.checkpoint",
        "app.runtime",
        "app.rollout app.score app.advantage app.update",
        "app.prompts app.batching",
        "app.model",
        "app.mesh",
        "app.environments",
        "app.reward app.report app.distributed",
        "app.plugins",
        "app.records",
        "settings",
    )
)
"""Layers: a package may import those of later layers; packages of one layer do not import each other."""

LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}

SETTINGS_BELOW_RUNTIME = {
    # The numbers of AdamW and its schedule; a literal.
    "app.update": "schema.algorithm.OptimizerSettings schema.algorithm.ScoredRole",
    # The numbers of the policies and of the length of segments; literals; a Ray actor makes a mesh of its own.
    "app.rollout": "schema.rollout.PdsrSettings schema.rollout.SegmentSettings schema.rollout.KVCacheType"
    " schema.rollout.PDSR_WINDOW_MIN schema.model.Quantization schema.mesh.MeshSettings",
    # Source, split and columns of the data sets; the syntax of their names.
    "app.prompts": "schema.data.DataSettings schema.model.split_revision",
    # Two literals; the syntax of a model's name.
    "app.model": "schema.model.AttentionImplementation schema.model.Quantization schema.model.split_revision",
    # Shape, platform and hosts; suggestions for the misspelled name of a slice.
    "app.mesh": "schema.mesh.MeshSettings loading.fields.did_you_mean loading.fields.nearest_names",
    # The reward functions and the limits of their processes; four names.
    "app.reward": "schema.reward.RewardSettings schema.reward.RewardFunctionSettings schema.reward.PluginSettings"
    " schema.reward.MODEL_REWARD schema.reward.OVERLONG_REWARD schema.reward.CALLABLE_PREFIX"
    " schema.reward.ENVIRONMENT_REWARD",
    # The values of keys, which are never shown.
    "app.plugins": "loading.secrets.redact loading.secrets.redact_also",
    # The environment and the limits of its processes; the values of keys, which are never shown.
    "app.environments": "loading.secrets.redact schema.reward.EnvironmentSettings schema.reward.PluginSettings",
    # The saved settings of a run, beside the defaults.
    "app.report": "loading.fields.FIELDS",
    # Hosts compare all their settings.
    "app.distributed": "Resolved loading.fields.FIELDS loading.fields.value_of",
    # The folder of a run, the settings that it saves, and how those of its sessions differ.
    "app.records": "schema.run.RunSettings Resolved loading.printing.from_yaml loading.config_file.ConfigFile"
    " checks.resumed_settings.SettingChange checks.resumed_settings.changed_settings loading.fields.FIELDS",
}
"""Package below `app.runtime` -> what it imports from `settings` besides `settings.errors`, and why: names, literals,
single sections that serve as small records, and the whole settings only where they are compared or saved."""

HOST_ONLY_PACKAGES = {"app.environments", "app.plugins", "app.report", "app.reward", "app.records", "settings"}
JAX_FAMILY = {"jax", "jaxlib", "flax", "optax", "orbax"}
IMPURE = {"time", "datetime", "random", "secrets", "threading", "multiprocessing", "concurrent", "asyncio"}
KERNELS = {
    *("app.model.kernels.tpu_attention", "app.model.kernels.tpu_decode", "app.rollout.sampling.threshold_kernel"),
    *("app.model.kernels.gpu_attention", "app.model.kernels.gpu_decode", "app.model.kernels.gpu_grouped_product"),
}
FORBIDDEN_MODULES = {"torch", "pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_NAMES = {
    *("eval", "exec", "__import__", "os.system", "os.popen"),
    "jax.default_backend",  # the platform is that of the devices in use
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
    here = package_of(module)
    if module == "app":
        return [f"line {found.line}: app/__init__.py imports" for found in find_imports(source)]
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
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            full_names |= {
                alias.asname or alias.name: base + alias.name for alias in node.names if alias.asname or base
            }
    imported = [found.target for found in find_imports(source)]
    problems = [name for name in imported if name.split(".")[0] in FORBIDDEN_MODULES or name in FORBIDDEN_NAMES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            first, dot, rest = ast.unparse(node).partition(".")
            name = full_names.get(first, first) + dot + rest
            problems += [f"line {node.lineno}: {name}"] * (name in FORBIDDEN_NAMES)
        elif isinstance(node, ast.Call):
            given = {str(keyword.arg): ast.unparse(keyword.value) for keyword in node.keywords}
            forbidden = [name for name in FORBIDDEN_UNLESS_FALSE & given.keys() if given[name] != "False"]
            problems += [f"line {node.lineno}: {name}={given[name]}" for name in forbidden]
    return problems


def reached(modules: set[str], sources: Mapping[str, str], *, lazily: bool) -> set[str]:
    """Returns all modules that importing `modules` loads; with `lazily`, also those loaded in functions."""
    seen: set[str] = set()
    waiting = list(modules)
    while waiting:
        parts = waiting.pop().split(".")
        prefixes = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        for module in prefixes - seen:
            seen.add(module)
            found = find_imports(sources[module]) if module in sources else ()
            waiting += [item.target for item in found if lazily or item.when_loaded]
    return seen


SOURCES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
    for pattern in ("grpo.py", "cli.py", "app/**/*.py", "settings/**/*.py")
    for path in sorted(REPOSITORY.glob(pattern))
}


def test_imports_follow_the_order_of_the_layers() -> None:
    problems = {module: layer_violations(module, source) for module, source in SOURCES.items()}
    assert {module: found for module, found in problems.items() if found} == {}
    against_the_order = {
        "app.score.scorer": "from app.update.step import UpdateStep",
        "app.model.decoder": "def build():\n    from app.batching import token_batch",
        "app.mesh.device_mesh": "if TYPE_CHECKING:\n    import app.model.decoder",
        "app.training.trainer": "from . import learner",
        "app.unknown.module": "",
    }
    assert all(len(layer_violations(module, source)) == 1 for module, source in against_the_order.items())


def test_packages_below_runtime_take_only_small_records_from_the_settings() -> None:
    below = {package for package, layer in LAYER_OF.items() if LAYER_OF["app.runtime"] < layer < LAYER_OF["settings"]}
    used: dict[str | None, set[str]] = {}
    for module, source in SOURCES.items():
        for found in find_imports(source) if package_of(module) in below else ():
            if found.target.startswith("settings.") and not found.target.startswith("settings.errors."):
                used.setdefault(package_of(module), set()).add(found.target.removeprefix("settings."))
    assert used == {package: {*names.split()} for package, names in SETTINGS_BELOW_RUNTIME.items()}


def test_nothing_forbidden_is_used() -> None:
    problems = {module: forbidden_uses(source) for module, source in SOURCES.items()}
    assert {module: found for module, found in problems.items() if found} == {}
    for source in (
        "def lazy():\n    from torch.nn import Linear",
        "value = eval(text)",
        "import yaml as y\ny.load(text, Loader=y.FullLoader)",
        "subprocess.run(command, shell=flag)",
        "import jax\nplatform = jax.default_backend()",
        "from flax import nnx\n@nnx.jit\ndef step(): ...",
    ):
        assert forbidden_uses(source), source


def test_jax_is_reached_neither_by_host_packages_nor_by_the_command_line() -> None:
    host_only = {module for module in SOURCES if package_of(module) in HOST_ONLY_PACKAGES}
    assert reached(host_only, SOURCES, lazily=True) & JAX_FAMILY == set()
    assert reached({"cli"}, SOURCES, lazily=False) & JAX_FAMILY == set()
    # Python agrees.
    program = f"import sys, {', '.join(sorted(host_only | {'cli'}))}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    assert JAX_FAMILY & set(loaded.split()) == set()


def test_scoring_a_file_reaches_neither_rollout_nor_training() -> None:
    modules = SOURCES.keys() & reached({"app.stages.score"}, SOURCES, lazily=True)
    packages = {package_of(module) for module in modules}
    assert not packages & {"app.rollout", "app.training", "app.reward", "app.report", "app.checkpoint", "app.update"}
    assert len([module for module in modules if module.startswith("app")]) <= 90


def test_scheduler_has_no_jax_clock_threads_or_randomness() -> None:
    core = {module for module in SOURCES if module.startswith("app.rollout.scheduling")}
    assert reached(core, SOURCES, lazily=True) & JAX_FAMILY == set()
    used = {found.target.split(".")[0] for module in core for found in find_imports(SOURCES[module])}
    assert used & IMPURE == set()


def test_kernels_are_loaded_only_by_the_functions_that_run_them() -> None:
    """Pallas is slow to import, and its backends for GPUs and TPUs may not be there on other platforms."""
    pallas = "jax.experimental.pallas"
    loaded = {
        module: [found for found in find_imports(source) if found.when_loaded] for module, source in SOURCES.items()
    }
    assert {name for name, found in loaded.items() if any(one.target.startswith(pallas) for one in found)} == KERNELS
    assert {module for module in loaded if KERNELS & reached({module}, SOURCES, lazily=False)} == KERNELS


def test_training_starts_without_the_packages_of_extras() -> None:
    started = reached({"app.training.train", "app.runtime.session"}, SOURCES, lazily=False)
    assert started & {"qwix", "ray", "math_verify", "tensorboardX"} == set()
