"""The networks of a run by their configurations alone: enough to say how large everything will be, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from app.model.architecture import Architecture
from app.model.decoder import DecoderDefinition, ValueDecoder
from app.model.io.families import CAUSAL_LM, SEQUENCE_CLASSIFICATION, architecture_from_config
from app.model.io.model_files import open_config_only, open_model
from app.prompts.tokenizer import load_tokenizer
from app.runtime.model_spec import (
    CriticSpec,
    ModelSpec,
    adapted_definition,
    check_context_length,
    model_setting_in_errors,
)
from settings import Settings


class ConfigSpec(NamedTuple):
    """A network without weights."""

    architecture: Architecture
    definition: DecoderDefinition


@dataclass(frozen=True)
class ConfigOnlySpec:
    """What a run's networks look like. Nothing of them can be loaded."""

    model: ModelSpec
    """With the built-in tokenizer: words play no part in sizes."""
    critic: CriticSpec | None
    reward_model: ConfigSpec | None


def read_config_only_spec(settings: Settings) -> ConfigOnlySpec:
    """Reads a `config.json` for each network; of the hub nothing else is fetched.

    Raises:
        InputError: a configuration that cannot be found or used, or a context that the longest sample does not fit.
    """
    files = open_config_only(settings.model.path, revision=settings.model.revision)
    architecture = architecture_from_config(files.config)
    check_context_length(architecture, settings, path=settings.model.path)
    words = load_tokenizer(open_model("builtin:tiny"))
    definition = DecoderDefinition.create(architecture)
    model = ModelSpec(files, architecture, definition, words, adapted_definition(definition, settings.model.lora))
    return ConfigOnlySpec(model, _critic_spec(settings, model), _reward_model_spec(settings))


def _critic_spec(settings: Settings, policy: ModelSpec) -> CriticSpec | None:
    if not settings.has_critic:
        return None
    files, architecture = policy.files, policy.architecture
    if settings.critic.path is not None:
        with model_setting_in_errors("critic.path", revision="critic.revision"):
            files = open_config_only(settings.critic.path, revision=settings.critic.revision)
            architecture = architecture_from_config(files.config, heads=CAUSAL_LM + SEQUENCE_CLASSIFICATION)
    return CriticSpec(files, architecture, DecoderDefinition.create(architecture, ValueDecoder))


def _reward_model_spec(settings: Settings) -> ConfigSpec | None:
    if settings.reward.model is None:
        return None
    with model_setting_in_errors("reward.model", revision="reward.model_revision"):
        files = open_config_only(settings.reward.model, revision=settings.reward.model_revision)
        architecture = architecture_from_config(files.config, heads=SEQUENCE_CLASSIFICATION)
    return ConfigSpec(architecture, DecoderDefinition.create(architecture, ValueDecoder))
