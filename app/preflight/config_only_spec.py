"""The networks of a run, described by their `config.json` alone, which determines sizes and placement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from app.model.decoder import DecoderDefinition, ValueDecoder
from app.model.io.families import CAUSAL_LM, SEQUENCE_CLASSIFICATION, architecture_from_config
from app.model.io.model_files import open_model
from app.prompts.tokenizer import load_tokenizer
from app.runtime.model_spec import (
    CriticSpec,
    ModelSpec,
    adapted_definition,
    check_context_length,
    check_routing_replay,
    model_setting_in_errors,
)
from settings import Settings


@dataclass(frozen=True)
class ConfigOnlySpec:
    """Specifications of a run's networks, without their weights."""

    model: ModelSpec
    """The policy, with the built-in tokenizer, because sizes do not depend on the tokenizer."""
    critic: CriticSpec | None
    reward_model: CriticSpec | None
    """The reward model, which is a value network like a critic."""


def read_config_only_spec(settings: Settings) -> ConfigOnlySpec:
    """Reads the `config.json` of each network; no other file is downloaded from the hub.

    Raises:
        InputError: a configuration cannot be found or used, or its context is shorter than the longest sample.
    """
    files = open_model(settings.model.path, config_only=True)
    architecture = architecture_from_config(files.config, attention=settings.model.attention)
    check_context_length(architecture, settings, path=settings.model.path)
    check_routing_replay(architecture, settings)
    tokenizer = partial(load_tokenizer, open_model("builtin:tiny"))
    definition = DecoderDefinition.create(architecture)
    model = ModelSpec(files, architecture, definition, tokenizer, adapted_definition(definition, settings.model.lora))
    critic = reward_model = None
    if settings.has_critic:
        critic = CriticSpec(files, architecture, DecoderDefinition.create(architecture, ValueDecoder))
        if settings.critic.path is not None:
            with model_setting_in_errors("critic.path"):
                heads = CAUSAL_LM + SEQUENCE_CLASSIFICATION
                critic = _read_value_network(settings, settings.critic.path, heads)
    if settings.reward.model is not None:
        with model_setting_in_errors("reward.model"):
            reward_model = _read_value_network(settings, settings.reward.model, SEQUENCE_CLASSIFICATION)
    return ConfigOnlySpec(model, critic, reward_model)


def _read_value_network(settings: Settings, path: str, heads: tuple[str, ...]) -> CriticSpec:
    files = open_model(path, config_only=True)
    architecture = architecture_from_config(files.config, heads=heads, attention=settings.model.attention)
    return CriticSpec(files, architecture, DecoderDefinition.create(architecture, ValueDecoder))
