"""The command `grpo presets`."""

from __future__ import annotations

from typing import Annotated

import typer

from app.commands.command_support import print_result
from settings import InputError
from settings.errors import join_words
from settings.loading.config_file import find_config_file, preset_names
from settings.loading.fields import did_you_mean, nearest_names


def presets(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Preset to print.", autocompletion=preset_names)] = "",
) -> None:
    """List the presets for --config, or print one as YAML."""
    texts = {preset: find_config_file(preset).content.decode() for preset in preset_names()}
    if name and name not in texts:
        raise InputError(
            f"unknown preset {name}; expected one of {join_words(texts)}{did_you_mean(nearest_names(name, texts))}"
        )
    first_lines = {preset: text.splitlines()[0].removeprefix("# ") for preset, text in texts.items()}
    print_result(first_lines, as_json=False, text=texts.get(name))
