"""What a replay tells of itself: what of the samples is taken, and what may not be meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from app.runtime.model_spec import ModelSpec
from app.training.replay_files import AvailableFields, StepFile
from settings import Settings

TRAINING_SECTIONS = ("algorithm", "optimizer", "critic", "model")
"""The sections that decide what becomes of a policy with given samples and rewards."""
MEMORY_ONLY_FIELDS = frozenset(
    {"max_tokens_per_device", "rows_per_device", "strategy", "dynamic_microbatch", "remat", "logits_chunk"}
)
"""Their fields that only decide how much is computed at once."""


class SourceRun(NamedTuple):
    """The run that has written samples."""

    settings: Settings
    """Hub models are at the commits that it had."""
    tokenizer_fingerprint: str | None
    """Fingerprint of what it had; None where no checkpoint tells."""


def make_replay_notes(
    files: Mapping[int, StepFile],
    available_fields: AvailableFields,
    settings: Settings,
    source: SourceRun | None,
    model: ModelSpec,
    *,
    uses_saved_rewards: bool,
    uses_saved_advantages: bool,
) -> list[str]:
    """One for each thing that a person should know.

    Args:
        source: None where the files are the end of a chain.
    """
    lines = [
        _rewards_note(available_fields, uses_saved=uses_saved_rewards),
        _advantages_note(is_chain=source is None, uses_saved=uses_saved_advantages),
    ]
    lines += _size_and_version_notes(files, settings, settings if source is None else source.settings)
    if source is not None:
        lines += _source_run_notes(files, settings, source, model, uses_saved_rewards=uses_saved_rewards)
    return lines


def _rewards_note(available_fields: AvailableFields, *, uses_saved: bool) -> str:
    if uses_saved:
        return "rewards: those of the samples"
    why = "reward.* is not what the samples' run had" if available_fields.rewards else "not every sample has one"
    return f"rewards: judged anew, {why}"


def _advantages_note(*, is_chain: bool, uses_saved: bool) -> str:
    if uses_saved:
        return "advantages and returns: those of the samples; without these fields algorithm.* would decide"
    return f"advantages: estimated anew{', not every sample has them' if is_chain else ''}"


def _size_and_version_notes(
    files: Mapping[int, StepFile], settings: Settings, source_settings: Settings
) -> Iterator[str]:
    rollout = settings.rollout
    first = min(files)
    newest, staleness = files[first].newest_version, source_settings.rollout.max_staleness
    if not first - 1 - staleness <= newest <= first - 1:
        yield (
            f"the samples of step {first} were drawn by version {newest} of the policy, and it is at version "
            f"{first - 1}: they are not its own (algorithm.correction weighs that)"
        )
    smaller = [step for step, file in files.items() if file.largest_group < rollout.group_size]
    if smaller:
        yield (
            f"groups have at most {files[smaller[0]].largest_group} samples in step {smaller[0]}, fewer than "
            f"rollout.group_size = {rollout.group_size}"
        )


def _source_run_notes(
    files: Mapping[int, StepFile], settings: Settings, source: SourceRun, model: ModelSpec, *, uses_saved_rewards: bool
) -> Iterator[str]:
    had = source.settings
    if source.tokenizer_fingerprint not in (None, model.tokenizer.fingerprint):
        yield (
            "the samples' run had another tokenizer, chat template or end-of-sequence token than model.path has: token "
            "ids are taken as they are"
        )
    if had.rollout.temperature != settings.rollout.temperature:
        yield (
            f"rollout.temperature is {settings.rollout.temperature}, and the samples were drawn at "
            f"{had.rollout.temperature}: their behavior_logprobs are at that"
        )
    schedule = settings.optimizer.schedule
    if had.run.steps != settings.run.steps and schedule != "constant":
        yield (
            f"run.steps is {settings.run.steps}, the run had {had.run.steps}: optimizer.schedule: {schedule} falls "
            "otherwise than there"
        )
    changed = [
        section
        for section in TRAINING_SECTIONS
        if _training_fields(settings, section) != _training_fields(had, section)
    ]
    others = [f"{section}.*" for section in changed] + ([] if uses_saved_rewards else ["rewards"])
    if len(files) > 1 and others:
        yield (
            f"from step {min(files) + 1} on the samples are those of the old run's policy, which had other "
            f"{' and '.join(others)} (algorithm.correction weighs that)"
        )


def _training_fields(settings: Settings, section: str) -> dict[str, Any]:
    chosen: dict[str, Any] = getattr(settings, section).model_dump()
    if section == "algorithm":
        # What a host has of a mini-batch depends on the number of hosts.
        chosen["mini_batch_prompts"] = settings.num_mini_batches
    return {name: value for name, value in chosen.items() if name not in MEMORY_ONLY_FIELDS}
