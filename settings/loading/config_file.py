"""Finds the file that `--config` selects: a preset or a path."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from settings.errors import InputError, join_words
from settings.loading.fields import did_you_mean, nearest_names
from settings.loading.yaml_file import MAX_BYTES
from settings.schema.section import COPYING, NO_ADDRESS

DEFAULT_PRESET = "quickstart"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    name: str
    """Name of the file in provenances, such as `yaml:NAME:3`."""
    stem: str
    """Name from which `run.name` is derived, such as `quickstart`."""
    content: bytes
    left_out: frozenset[str] = frozenset()
    """Settings to ignore in `content`, because the user did not set them."""
    is_own: bool = True
    """Whether the user wrote this file; false for a preset or the settings of an earlier run."""


def preset_names() -> list[str]:
    """Returns the names of the presets, which are YAML files in this package."""
    folder = files("settings") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def is_config(name: str) -> bool:
    """Returns whether a command-line word looks like a value of `--config`: a preset or a YAML file."""
    return name in preset_names() or name.endswith((".yaml", ".yml"))


def find_config_file(config: str | ConfigFile | None) -> ConfigFile:
    """Reads the preset with this name, or else the file at this path; None means the default preset.

    A `ConfigFile` is returned unchanged.

    Raises:
        InputError: no preset or file has this name, or the file cannot be read.
    """
    if isinstance(config, ConfigFile):
        return config
    name = DEFAULT_PRESET if config is None else config
    if name in preset_names():
        resource = files("settings") / "presets" / f"{name}.yaml"
        return ConfigFile(f"settings/presets/{name}.yaml", name, resource.read_bytes(), is_own=False)
    if "://" in name:
        raise InputError(f"--config: {NO_ADDRESS}, got {name!r}; {COPYING}")
    path = Path(name)
    shown = name if name.isprintable() else ascii(name)
    try:
        with path.open("rb") as file:
            return ConfigFile(shown, path.stem, file.read(MAX_BYTES + 1))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null byte in the name
        raise InputError(
            f"--config: there is no file {Path(shown).absolute()}; give another one, or a preset: "
            f"{join_words(preset_names())}{did_you_mean(nearest_names(name, preset_names()))}"
        ) from None
    except OSError as error:
        way_out = "give a YAML file, or the settings.yaml of a run"
        raise InputError(f"--config: {Path(shown).absolute()} cannot be read: {error.strerror}; {way_out}") from None
