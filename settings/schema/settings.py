"""All sections of the settings, and what follows from several of them.

Types are strict: no setting takes a boolean for a number, `1e3` for an integer or a quoted number for a number. Checks
that need two fields are in `settings.checks`; checks that need a model file or a device are where it is opened.
This package imports neither jax nor numpy: `--print-config` and `--help` must answer at once.
"""

from __future__ import annotations

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from settings.schema.algorithm import CRITIC_ESTIMATORS, AlgorithmSettings
from settings.schema.batching import BatchingSettings
from settings.schema.checkpoint import CheckpointSettings
from settings.schema.critic import CriticSettings
from settings.schema.data import DataSettings
from settings.schema.eval import EvalSettings
from settings.schema.logging import LoggingSettings
from settings.schema.mesh import MeshSettings
from settings.schema.model import ModelSettings
from settings.schema.optimizer import OptimizerSettings
from settings.schema.reward import RewardSettings
from settings.schema.rollout import RolloutSettings
from settings.schema.run import RunSettings
from settings.schema.score import SCORED_ROLES, ScoredRole, ScoreSettings
from settings.schema.watchdog import WatchdogSettings

LEGACY_PROMPT_ALLOWANCE = 128
"""The historic runner's `max_length_total` left this many tokens for the prompt."""


class Settings(BaseSettings):
    """All sections. `settings.load` builds it from its layers; `Settings()` is the defaults alone."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, strict=True)

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    reward: RewardSettings = RewardSettings()
    batching: BatchingSettings = BatchingSettings()
    score: ScoreSettings = ScoreSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    critic: CriticSettings = CriticSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    mesh: MeshSettings = MeshSettings()
    watchdog: WatchdogSettings = WatchdogSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    eval: EvalSettings = EvalSettings()
    logging: LoggingSettings = LoggingSettings()

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps of one pass over a step's prompts."""
        step = self.rollout.prompts_per_step
        return step // (self.algorithm.mini_batch_prompts or step)

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a training step."""
        return self.num_mini_batches * self.algorithm.epochs

    @property
    def has_critic(self) -> bool:
        """A second network learns the values that advantages are estimated from."""
        return self.algorithm.estimator in CRITIC_ESTIMATORS

    @property
    def offloads_reference(self) -> bool:
        """Its weights wait in the hosts' memory; with adapters they are the policy's own, which every pass needs."""
        return "reference" in self.scored_roles and self.score.reference.offload and not self.model.lora.rank

    @property
    def num_policy_updates(self) -> int:
        """Optimizer steps of the policy in the whole run."""
        warmup = self.critic.warmup_steps if self.has_critic else 0
        return (self.run.steps - warmup) * self.updates_per_step

    @property
    def uses_packing(self) -> bool:
        """Whether samples of a step share rows, in an update or in the scoring of a role."""
        updated = [self.algorithm, self.critic] if self.has_critic else [self.algorithm]
        scored = [self.score.for_role(role) for role in self.scored_roles]
        return any(one.dynamic_microbatch for one in updated) or any(one.dynamic for one in scored)

    @property
    def scored_roles(self) -> tuple[ScoredRole, ...]:
        """Whose logprobs or values a step takes before its updates.

        The policy's where several updates follow or rewards or values are corrected by them, the reference's for KL.
        """
        policy = self.updates_per_step > 1 or self.algorithm.kl_in_reward or self.algorithm.estimator == "vtrace"
        reference = self.algorithm.beta > 0
        needed = {"policy": policy, "reference": reference, "critic": self.has_critic}
        return tuple(role for role in SCORED_ROLES if needed[role])

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Nothing ambient: `settings.loading.sources` reads the environment, by names that are ours."""
        return (init_settings,)
