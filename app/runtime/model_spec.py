"""Opens the files, architecture and tokenizer of a model, and checks that they fit each other; loads no weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import jax.numpy as jnp

from app.model.architecture import Architecture
from app.model.decoder import DecoderDefinition, ValueDecoder
from app.model.experts import UNRECORDED
from app.model.io.families import CAUSAL_LM, SEQUENCE_CLASSIFICATION, architecture_from_config
from app.model.io.hf_weights import (
    LM_HEAD,
    FirstTokens,
    check_tensors,
    critic_tensors,
    expected_tensors,
    has_own_head,
)
from app.model.io.model_files import ModelFiles, is_from_hub, open_model
from app.model.lora import LoRAConfig
from app.model.quantization import QUANTIZE_BASE_SETTING, check_quantization
from app.prompts.tokenizer import Tokenizer, encoding_fingerprint, load_fast_tokenizer, load_tokenizer
from app.records.text_format import format_percent
from app.records.versions import QUANTIZATION_PACKAGE, version_of
from settings import Settings
from settings.errors import InputError, join_words, renamed_in_errors
from settings.schema.model import PROJECTION_GROUPS, AttentionImplementation, ModelSettings
from settings.schema.rollout import RolloutWeights

log = logging.getLogger(__name__)

LORA_FINGERPRINT = "model.lora"
"""Name of the adapters' fingerprint, which a resumed run must not change."""
QUANTIZER_FINGERPRINT = f"the version of {QUANTIZATION_PACKAGE}, which finds the codes of quantized kernels"
"""Name of the quantizer's fingerprint: checkpoints store no quantized kernels, so a resumed run recomputes them."""


@dataclass(frozen=True)
class NetworkSpec:
    """A network whose files have been checked but not loaded: no device has been used."""

    files: ModelFiles
    architecture: Architecture
    definition: DecoderDefinition
    """Definition of the network's own weights, as stored in its files."""


@dataclass(frozen=True)
class ModelSpec(NetworkSpec):
    """The files, architecture and tokenizer of the policy."""

    load_tokenizer: Callable[[], Tokenizer]
    """Loads the tokenizer; called once, by the first use of `tokenizer`."""
    policy_definition: DecoderDefinition
    """Definition of the trained policy: `definition`, with adapters and quantized kernels if `model.lora` sets them."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded on first use. Raises InputError if the model has no usable tokenizer."""
        return self.load_tokenizer()

    @cached_property
    def reference_definition(self) -> DecoderDefinition:
        """Definition of the reference: `policy_definition` without its adapters."""
        return self.policy_definition.without_adapters

    @property
    def adapter_fingerprints(self) -> dict[str, str]:
        """Fingerprints of the adapters, which must equal those in a checkpoint; empty without adapters."""
        lora, quantization = self.policy_definition.lora, self.policy_definition.quantization
        if lora is None:
            return {}
        if quantization is None:
            return {LORA_FINGERPRINT: lora.to_text()}
        return {
            LORA_FINGERPRINT: f"{lora.to_text()}, beside {quantization}",
            QUANTIZER_FINGERPRINT: version_of(QUANTIZATION_PACKAGE),
        }

    def decode_definition(self, dtype: jnp.dtype, weights: RolloutWeights | None = None) -> DecoderDefinition:
        """Returns the decoder definition for generation; in float32, adapters are merged into the kernels.

        In bfloat16, W + (alpha / rank) A B would lose the part of A B below the last bit of W. For many steps this is
        most of A B, so the sampler would not follow the policy. Quantized kernels would lose even more. In both cases
        adapters stay separate from the kernels, as in training and scoring.

        Args:
            weights: quantization of the kernels for generation only (`rollout.weights`).

        Raises:
            InputError: `weights` is given, but the kernels are already quantized or belong to experts.
        """
        if weights is not None and self.policy_definition.quantization is not None:
            raise InputError(
                f"rollout.weights: {weights} quantizes weights for generation, but {QUANTIZE_BASE_SETTING}: "
                f"{self.policy_definition.quantization} has already quantized them; set rollout.weights to null"
            )
        if weights is not None:
            refuse_quantized_experts(self.architecture, f"rollout.weights: {weights}")
            return self.policy_definition.quantized(weights)
        if dtype == jnp.float32 and self.policy_definition.quantization is None:
            return self.definition
        return self.policy_definition

    @property
    def without_adapters(self) -> ModelSpec:
        """This model with its original weights as the policy."""
        return replace(self, policy_definition=self.definition)


def read_model_spec(settings: Settings, *, generates: bool = True, config_only: bool = False) -> ModelSpec:
    """Opens the files and the tokenizer of `model.path` and checks that they fit each other.

    Args:
        generates: False to score only; the tokenizer is then read on first use, because only texts need it.
        config_only: whether to read only `config.json`, which determines sizes and placement; the tokenizer is then
            the built-in one.

    Raises:
        InputError: the model cannot be used; detected here rather than later on the device.
    """
    causal_lm = _open_causal_lm("model.path", settings.model.path, settings.model.attention, config_only=config_only)
    files, architecture, definition = causal_lm.files, causal_lm.architecture, causal_lm.definition
    experts = architecture.num_experts
    if settings.rollout.routing_replay and (experts is None or experts > UNRECORDED):
        mixture = f"a mixture of {experts} experts, but a byte can record only {UNRECORDED}"
        raise InputError(
            f"rollout.routing_replay: true records the experts of each token, but {settings.model.path} is "
            f"{'a dense model' if experts is None else mixture}; set rollout.routing_replay to false"
        )
    adapted = adapted_definition(definition, settings.model)

    def read_tokenizer() -> Tokenizer:
        if config_only:
            return load_tokenizer(open_model("builtin:tiny"))
        needs_template = generates and settings.data.chat_template != "none"
        chosen = {"eos_tokens": settings.model.eos_tokens, "needs_template": needs_template}
        return load_tokenizer(files, settings.data.chat_template_kwargs, **chosen)

    model = ModelSpec(files, architecture, definition, read_tokenizer, adapted)
    if generates and not config_only:
        _ = model.tokenizer
    return model


def _open_causal_lm(setting: str, path: str, attention: AttentionImplementation, *, config_only: bool) -> NetworkSpec:
    """Opens the files of a causal language model; if they have no LM head, the embeddings are tied."""
    files = open_model(path, config_only=config_only)
    with model_setting_in_errors(setting), _config_source_in_errors(files):
        architecture = architecture_from_config(files.config, attention=attention)
    if architecture.tied_embeddings and has_own_head(files.weights):
        log.warning(
            "%s: config.json of %s ties %s to the embedding, but the file has different values for it, which are "
            "used, as in transformers; set tie_word_embeddings: false in config.json",
            *(setting, files.name, LM_HEAD),
        )
        files = replace(files, config=files.config | {"tie_word_embeddings": False})
        architecture = replace(architecture, tied_embeddings=False)
    definition = DecoderDefinition.create(architecture)
    if not config_only:
        check_tensors(expected_tensors(definition), files.weights.shapes, architecture)
    return NetworkSpec(files, architecture, definition)


def adapted_definition(definition: DecoderDefinition, model: ModelSettings) -> DecoderDefinition:
    """Returns the definition with the adapters of `model.lora` and frozen weights in `model.dtype`, if there are any.

    Raises:
        InputError: the rank exceeds the model's width, or the kernels cannot have these adapters or this quantization.
    """
    settings = model.lora
    if not settings.rank:
        return definition
    architecture = definition.architecture
    if settings.rank > architecture.model_dim:
        raise InputError(
            f"model.lora.rank: {settings.rank} is more than the model's width {architecture.model_dim}, the "
            "highest rank of its kernels; lower it (8 to 64 are usual)"
        )
    if settings.quantize_base is not None:
        refuse_quantized_experts(architecture, f"{QUANTIZE_BASE_SETTING}: {settings.quantize_base}")
        check_quantization(settings.quantize_base, model_dim=architecture.model_dim)
    if architecture.num_experts is not None and {*settings.projections} & {*PROJECTION_GROUPS["mlp"]}:
        raise InputError(
            f"model.lora.targets: {join_words(settings.targets, last='and')} would adapt the MLP, but this model has "
            f"{architecture.num_experts} experts instead, which get no adapters; set model.lora.targets: attention"
        )
    lora = LoRAConfig(settings.rank, settings.alpha, settings.projections)
    adapted = DecoderDefinition.create(architecture, lora=lora, quantization=settings.quantize_base)
    return adapted.held_in(jnp.dtype(model.dtype))


def refuse_quantized_experts(architecture: Architecture, setting: str) -> None:
    """Raises InputError if the model has experts, whose matrices `setting` cannot quantize."""
    if architecture.num_experts is not None:
        raise InputError(f"{setting} cannot quantize the matrices of this model's experts; set it to null")


def open_value_network(path: str, settings: Settings, *, heads: tuple[str, ...], config_only: bool) -> NetworkSpec:
    """Opens the files of a network with a value head, without checking its tensors."""
    files = open_model(path, config_only=config_only)
    with _config_source_in_errors(files):
        architecture = architecture_from_config(files.config, heads=heads, attention=settings.model.attention)
    return NetworkSpec(files, architecture, DecoderDefinition.create(architecture, ValueDecoder))


def read_critic_spec(settings: Settings, policy: ModelSpec, *, config_only: bool = False) -> NetworkSpec:
    """Reads the model of `critic.path`, or of `model.path` if it is null, as a value decoder.

    Raises:
        InputError: the model cannot be used as a critic, for example because its token ids differ from the policy's.
    """
    if settings.critic.path is None:
        definition = DecoderDefinition.create(policy.architecture, ValueDecoder)
        return NetworkSpec(policy.files, policy.architecture, definition)
    with model_setting_in_errors("critic.path"):
        heads = CAUSAL_LM + SEQUENCE_CLASSIFICATION
        critic = open_value_network(settings.critic.path, settings, heads=heads, config_only=config_only)
        if config_only:
            return critic
        shapes = critic.files.weights.shapes
        check_tensors(critic_tensors(critic.definition, shapes), shapes, critic.architecture)
        same_ids = encoding_fingerprint(load_fast_tokenizer(critic.files)) == policy.tokenizer.encoding_fingerprint
    if not same_ids:
        raise InputError(
            f"critic.path: the tokenizer of {settings.critic.path} differs from that of model.path "
            f"{settings.model.path}, so the critic would misread the policy's tokens; choose a critic of the "
            "policy's family, or set critic.path: null"
        )
    return critic


def read_reference_spec(settings: Settings, policy: ModelSpec, *, config_only: bool = False) -> NetworkSpec:
    """Reads the teacher of `reference.path`; its embeddings and logits are cut to the vocabulary size of the policy.

    Raises:
        InputError: the model cannot be used as a teacher, for example because its tokens differ from the policy's.
    """
    path, num_tokens = settings.reference.source, policy.architecture.vocab_size
    assert path is not None
    if settings.reference.revision is not None and not is_from_hub(settings.reference.path or ""):
        raise InputError(
            f"reference.revision: {settings.reference.path} is not on the hub, so it has no revisions; set "
            "reference.revision to null"
        )
    with model_setting_in_errors("reference.path"):
        teacher = _open_causal_lm("reference.path", path, settings.model.attention, config_only=config_only)
        of_teacher = {} if config_only else load_fast_tokenizer(teacher.files).get_vocab()
    problem = None
    if teacher.architecture.vocab_size < num_tokens:
        problem = f"{path} has {teacher.architecture.vocab_size:,} tokens, fewer than the {num_tokens:,} of"
    elif not config_only:
        tokens, own = ({i: token for token, i in one.items()} for one in (of_teacher, policy.tokenizer.vocabulary))
        if (i := next((i for i in sorted(own) if tokens.get(i) != own[i]), None)) is not None:
            problem = f"token {i} of {path} is {tokens.get(i)!r}, but {own[i]!r} in"
    if problem is not None:
        raise InputError(
            f"reference.path: {problem} {settings.model.path}, so the teacher would misread the policy's tokens; "
            "choose a teacher of the policy's family"
        )
    architecture = replace(teacher.architecture, vocab_size=num_tokens)
    files = replace(teacher.files, weights=FirstTokens(teacher.files.weights, num_tokens))
    return NetworkSpec(files, architecture, DecoderDefinition.create(architecture))


@contextmanager
def model_setting_in_errors(setting: str) -> Iterator[None]:
    """Makes each InputError of the `with` block name `setting` instead of `model.path`."""
    try:
        with renamed_in_errors("model.path", to=setting):
            yield
    except InputError as error:
        raise InputError(str(error) if setting in str(error) else f"{setting}: {error}") from error


def _config_source_in_errors(files: ModelFiles) -> AbstractContextManager[None]:
    """Makes each InputError of the `with` block name the file of the configuration, which may be a GGUF file."""
    return renamed_in_errors("config.json", to=files.path.name if files.path.suffix == ".gguf" else "config.json")


def adapter_notes(model: ModelSpec, *, has_critic: bool) -> tuple[str, ...]:
    """Returns a note on the fraction of weights that the adapters train; empty without adapters."""
    definition = model.policy_definition
    if definition.lora is None:
        return ()
    num_trained, num_all = definition.num_trainable, definition.num_parameters
    base = "" if definition.quantization is None else f", with the layers' matrices in {definition.quantization}"
    critic = "; the critic trains all its weights" if has_critic else ""
    return (
        f"{LORA_FINGERPRINT}: {num_trained:,} weights are trained ({definition.lora.to_text()}), "
        f"{format_percent(num_trained / num_all)} of {num_all:,}; the {num_all - num_trained:,} weights of "
        f"{model.files.name} are frozen{base}{critic}",
    )


def check_context_length(architecture: Architecture, settings: Settings, *, path: str) -> None:
    """Raises InputError if the longest prompt and completion together exceed the context of the model from `path`."""
    longest = settings.data.max_prompt_length + settings.rollout.max_new_tokens
    if longest > architecture.max_positions:
        raise InputError(
            f"data.max_prompt_length + rollout.max_new_tokens = {settings.data.max_prompt_length} + "
            f"{settings.rollout.max_new_tokens} = {longest} tokens, but the context of {path} is "
            f"{architecture.max_positions}; lower one of the two"
        )
