"""All sections of the settings, and properties that follow from several sections.

Types are strict: a boolean is not a number, `1e3` is not an integer, and a quoted number is text. Checks that involve
two fields are in `settings.checks`; checks that need a model file or a device are next to the code that uses it.
This package imports neither jax nor numpy, so that `--print-config` and `--help` respond immediately.
"""

from __future__ import annotations

from typing import Any

from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from settings.schema.algorithm import (
    CRITIC_ESTIMATORS,
    SCORED_ROLES,
    AlgorithmSettings,
    CriticSettings,
    OptimizerSettings,
    ReferenceSettings,
    ScoredRole,
    ScoreSettings,
)
from settings.schema.data import DataSettings
from settings.schema.mesh import MeshSettings
from settings.schema.model import ModelSettings
from settings.schema.reward import (
    ENVIRONMENT_REWARD,
    MODEL_REWARD,
    OVERLONG_REWARD,
    EnvironmentSettings,
    PluginSettings,
    RewardSettings,
)
from settings.schema.rollout import RolloutSettings
from settings.schema.run import CheckpointSettings, EvalSettings, LoggingSettings, RunSettings, WatchdogSettings

LEGACY_PROMPT_ALLOWANCE = 128
"""Number of prompt tokens included in the historic runner's `max_length_total`."""
MODEL_DEFAULTS = {"model.dtype": "bfloat16", "data.max_prompt_length": 512, "rollout.max_new_tokens": 512}
"""Defaults for models that are not built in; `model.dtype` applies only on accelerators."""


class Settings(BaseSettings):
    """All settings of a run. `settings.load` builds them from layers; `Settings()` has the defaults."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, strict=True)

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    env: EnvironmentSettings = EnvironmentSettings()
    reward: RewardSettings = RewardSettings()
    plugins: PluginSettings = PluginSettings()
    score: ScoreSettings = ScoreSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    reference: ReferenceSettings = ReferenceSettings()
    critic: CriticSettings = CriticSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    mesh: MeshSettings = MeshSettings()
    watchdog: WatchdogSettings = WatchdogSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    eval: EvalSettings = EvalSettings()
    logging: LoggingSettings = LoggingSettings()

    @property
    def is_supervised(self) -> bool:
        """Whether steps train on given completions instead of sampled ones."""
        return self.algorithm.name == "sft"

    @property
    def num_mini_batches(self) -> int:
        """Number of optimizer steps in one pass over a training step's prompts."""
        step = self.rollout.prompts_per_step
        return step // (self.algorithm.mini_batch_prompts or step)

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer steps in a training step."""
        return self.num_mini_batches * self.algorithm.epochs

    @property
    def has_critic(self) -> bool:
        """Whether a critic learns values for the advantages."""
        return self.algorithm.estimator in CRITIC_ESTIMATORS

    @property
    def reward_weights(self) -> dict[str, float]:
        """Maps each part of the reward to its weight, unless that is 0; the length penalty has weight 1."""
        weights = {function.name: function.weight for function in self.reward.functions}
        weights |= {ENVIRONMENT_REWARD: self.env.weight} if self.env.source is not None else {}
        weights |= {MODEL_REWARD: self.reward.model_weight} if self.reward.model is not None else {}
        weights |= {OVERLONG_REWARD: 1.0} if self.reward.overlong_buffer is not None else {}
        return {name: weight for name, weight in weights.items() if weight}

    @property
    def compared_parts(self) -> dict[str, float]:
        """Maps the separately compared parts of the reward to their weights; empty if their sum is compared."""
        return self.reward_weights if self.algorithm.reward_normalization == "each_first" else {}

    @property
    def has_teacher(self) -> bool:
        """Whether the policy learns from the KL to a model other than the one that it starts from."""
        return self.algorithm.beta > 0 and self.reference.path is not None

    @property
    def has_reward(self) -> bool:
        """Whether any part of the reward except the length penalty has a weight other than 0."""
        reward, env = self.reward, self.env
        weights = (reward.model and reward.model_weight, env.source and env.weight)
        return any((*weights, *(function.weight for function in reward.functions)))

    @property
    def offloads_reference(self) -> bool:
        """Whether reference weights are kept in host memory. With adapters and no teacher, there are none to keep."""
        has_weights = self.has_teacher or not self.model.lora.rank
        return "reference" in self.scored_roles and self.score.reference.offload and has_weights

    @property
    def num_policy_updates(self) -> int:
        """Number of optimizer steps of the policy in the whole run."""
        warmup = self.critic.warmup_steps if self.has_critic else 0
        return (self.run.steps - warmup) * self.updates_per_step

    @property
    def scored_roles(self) -> tuple[ScoredRole, ...]:
        """Roles that are scored in a training step before its updates; none with `algorithm.name: sft`.

        The policy is scored if a step has several updates, or if rewards, advantages or values depend on its logprobs.
        """
        if self.is_supervised:
            return ()
        policy = self.updates_per_step > 1 or self.algorithm.penalizes_samples or self.algorithm.estimator == "vtrace"
        reference = self.algorithm.beta > 0
        needed = {"policy": policy, "reference": reference, "critic": self.has_critic}
        return tuple(role for role in SCORED_ROLES if needed[role])

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **others: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Returns a settings source for each of `layers`, the strongest first, and none of pydantic's own."""
        assert isinstance(init_settings, InitSettingsSource)
        layers = init_settings.init_kwargs.pop("layers", ())
        return (*(InitSettingsSource(settings_cls, layer) for layer in layers), init_settings)
