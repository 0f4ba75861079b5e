"""The networks of a run by their configurations alone: enough to say how large everything will be, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from app.model.architecture import Architecture
from app.model.decoder import DecoderDefinition, ValueDecoder
from app.model.io.families import CAUSAL_LM, SEQUENCE_CLASSIFICATION, architecture_from_config
from app.model.io.model_files import open_model, open_outline
from app.prompts.tokenizer import load_tokenizer
from app.runtime.model_spec import CriticInput, ModelInput, adapted_definition, check_context, naming
from settings import Settings


class Network(NamedTuple):
    """A network without weights."""

    architecture: Architecture
    definition: DecoderDefinition


@dataclass(frozen=True)
class Outline:
    """What a run's networks look like. Nothing of them can be loaded."""

    model: ModelInput
    """With the built-in tokenizer: words play no part in sizes."""
    critic: CriticInput | None
    reward_model: Network | None


def read_outline(settings: Settings) -> Outline:
    """Reads a `config.json` for each network; of the hub nothing else is fetched.

    Raises:
        InputError: a configuration that cannot be found or used, or a context that the longest sample does not fit.
    """
    files = open_outline(settings.model.path, revision=settings.model.revision)
    architecture = architecture_from_config(files.config)
    check_context(architecture, settings, path=settings.model.path)
    words = load_tokenizer(open_model("builtin:tiny"))
    definition = DecoderDefinition.of(architecture)
    model = ModelInput(files, architecture, definition, words, adapted_definition(definition, settings.model.lora))
    return Outline(model, _critic(settings, model), _reward_model(settings))


def _critic(settings: Settings, policy: ModelInput) -> CriticInput | None:
    if not settings.has_critic:
        return None
    files, architecture = policy.files, policy.architecture
    if settings.critic.path is not None:
        with naming("critic.path", revision="critic.revision"):
            files = open_outline(settings.critic.path, revision=settings.critic.revision)
            architecture = architecture_from_config(files.config, heads=CAUSAL_LM + SEQUENCE_CLASSIFICATION)
    return CriticInput(files, architecture, DecoderDefinition.of(architecture, ValueDecoder))


def _reward_model(settings: Settings) -> Network | None:
    if settings.reward.model is None:
        return None
    with naming("reward.model", revision="reward.model_revision"):
        files = open_outline(settings.reward.model, revision=settings.reward.model_revision)
        architecture = architecture_from_config(files.config, heads=SEQUENCE_CLASSIFICATION)
    return Network(architecture, DecoderDefinition.of(architecture, ValueDecoder))
