"""What a replay tells of itself: what of the samples is taken, and what may not be meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from app.runtime.model_spec import ModelInput
from app.training.replay_files import Found, StepFile
from settings import Settings

LEARNED_BY = ("algorithm", "optimizer", "critic", "model")
"""The sections that decide what becomes of a policy with given samples and rewards."""
OF_MEMORY = frozenset(
    {"max_tokens_per_device", "rows_per_device", "strategy", "dynamic_microbatch", "remat", "logits_chunk"}
)
"""Their fields that only decide how much is computed at once."""


class Source(NamedTuple):
    """The run that has written samples."""

    settings: Settings
    """Hub models are at the commits that it had."""
    tokenizer: str | None
    """Fingerprint of what it had; None where no checkpoint tells."""


def lines_of(
    files: Mapping[int, StepFile],
    found: Found,
    settings: Settings,
    source: Source | None,
    model: ModelInput,
    *,
    takes_rewards: bool,
    takes_credit: bool,
) -> list[str]:
    """One for each thing that a person should know.

    Args:
        source: None where the files are the end of a chain.
    """
    lines = [_of_rewards(found, taken=takes_rewards), _of_credit(is_chain=source is None, taken=takes_credit)]
    lines += _of_sizes_and_versions(files, settings, settings if source is None else source.settings)
    if source is not None:
        lines += _of_the_source(files, settings, source, model, takes_rewards=takes_rewards)
    return lines


def _of_rewards(found: Found, *, taken: bool) -> str:
    if taken:
        return "rewards: those of the samples"
    why = "reward.* is not what the samples' run had" if found.rewards else "not every sample has one"
    return f"rewards: judged anew, {why}"


def _of_credit(*, is_chain: bool, taken: bool) -> str:
    if taken:
        return "advantages and returns: those of the samples; without these fields algorithm.* would decide"
    return f"advantages: estimated anew{', not every sample has them' if is_chain else ''}"


def _of_sizes_and_versions(files: Mapping[int, StepFile], settings: Settings, had: Settings) -> Iterator[str]:
    rollout = settings.rollout
    first = min(files)
    newest, staleness = files[first].newest_version, had.rollout.max_staleness
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


def _of_the_source(
    files: Mapping[int, StepFile], settings: Settings, source: Source, model: ModelInput, *, takes_rewards: bool
) -> Iterator[str]:
    had = source.settings
    if source.tokenizer not in (None, model.tokenizer.fingerprint):
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
    changed = [section for section in LEARNED_BY if _decides(settings, section) != _decides(had, section)]
    others = [f"{section}.*" for section in changed] + ([] if takes_rewards else ["rewards"])
    if len(files) > 1 and others:
        yield (
            f"from step {min(files) + 1} on the samples are those of the old run's policy, which had other "
            f"{' and '.join(others)} (algorithm.correction weighs that)"
        )


def _decides(settings: Settings, section: str) -> dict[str, Any]:
    chosen: dict[str, Any] = getattr(settings, section).model_dump()
    if section == "algorithm":
        # What a host has of a mini-batch depends on the number of hosts.
        chosen["mini_batch_prompts"] = settings.num_mini_batches
    return {name: value for name, value in chosen.items() if name not in OF_MEMORY}
