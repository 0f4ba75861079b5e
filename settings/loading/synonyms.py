"""Other names of settings: aliases, TRL's and verl's names, and removed settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import NamedTuple

ALIASES: dict[str, tuple[str, ...]] = {
    "steps": ("run.steps",),
    "training_steps": ("run.steps",),
    "batch_size": ("rollout.prompts_per_step",),
    "num_pre_q": ("rollout.group_size",),
    "max_length_sample": ("rollout.max_new_tokens",),
    "max_length_total": ("rollout.max_length_total",),
    "global_length": ("rollout.prefill_length_min",),
    "mesh_shape": ("mesh.shape",),
    "model_path": ("model.path",),
    "wandb_project": ("logging.wandb_project",),
    "wandb_name": ("run.name",),
    "wandb_mode": ("logging.wandb_mode",),
    "rollout_logprob_mbs_per_gpu": ("score.policy.rows_per_device",),
    "ref_logprob_mbs_per_gpu": ("score.reference.rows_per_device",),
    "use_dynamic_bsz": ("score.dynamic", "algorithm.dynamic_microbatch"),
    "log_prob_use_dynamic_bsz": ("score.dynamic",),
    "ppo_max_token_len_per_gpu": ("algorithm.max_tokens_per_device",),
    "ppo_infer_max_token_len_per_gpu": ("score.max_tokens_per_device",),
    "log_prob_max_token_len_per_gpu": ("score.max_tokens_per_device",),
    "forward_max_token_len_per_gpu": ("score.critic.max_tokens_per_device", "score.reward.max_tokens_per_device"),
    "ppo_mini_batch_size": ("algorithm.mini_batch_prompts",),
    "balance_batch": ("algorithm.balance_batch",),
    "ppo_epochs": ("algorithm.epochs",),
    "beta": ("algorithm.beta",),
}
"""Maps a name of the historic runner or verl to the dotted fields that it sets.

These names are accepted at the top level of YAML, in `--set`, and in upper case in the environment.
"""
HISTORIC_NAMES = ("grad_accum_steps",)
"""Names of the historic runner that have no field in `ALIASES`."""
VERL_ROOT = "actor_rollout_ref."


class Synonym(NamedTuple):
    """A setting of another program and what corresponds to it here."""

    title: str
    """The name in messages, such as `TRL's num_generations`. Names with a dot belong to verl."""
    fields: tuple[str, ...]
    """The settings that correspond to it; empty if there are none."""
    remark: str
    """How to convert its value, or what to use instead; empty if neither needs saying."""


def _read_table() -> Iterator[tuple[str, str, str]]:
    """Yields the setting here, the other program's name and a remark for each name in `synonyms.txt`."""
    for line in (files("settings") / "loading" / "synonyms.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            here, names, *remark = (" ".join(cell.split()) for cell in line.split("|"))
            yield from ((here, name, "".join(remark)) for name in names.split(", "))


def _title(name: str) -> str:
    program = "the historic runner" if name in HISTORIC_NAMES else "verl" if "." in name else "TRL"
    return f"{program}'s {name}"


REMOVED = {name: remark for here, name, remark in _read_table() if here == "removed"}
"""Maps a removed setting, or a removed section with all its settings, to what replaced it or why it is gone."""
SYNONYMS = {
    name.removeprefix(VERL_ROOT): Synonym(_title(name), () if here == "–" else tuple(here.split()), remark)
    for here, name, remark in _read_table()
    if here != "removed"
}
"""Maps a setting of TRL, verl or the historic runner to its synonym; `sops/migrate/` has them as tables."""


def explain_removal(name: str) -> str | None:
    """Returns why a setting, or its section, was removed; None if it was not."""
    return next((reason for removed, reason in REMOVED.items() if f"{name}.".startswith(f"{removed}.")), None)


def find_synonyms(name: str, sections: Collection[str]) -> tuple[list[Synonym], bool]:
    """Returns the settings of other programs that a name may stand for, and whether the match is exact.

    An inexact match has the same last part and shares most of the other parts. A short name inside one of our
    `sections` must share a part: `critic.lr` is verl's `critic.optim.lr`, but `critic.epsilon` is not TRL's `epsilon`.
    """
    for theirs, synonym in SYNONYMS.items():
        if fnmatchcase(name, theirs):
            return [synonym], True
    *parts, last = name.split(".")
    shared = {
        theirs: len({*parts} & {*".".join((theirs, *synonym.fields)).split(".")})
        for theirs, synonym in SYNONYMS.items()
        if theirs.rpartition(".")[2] == last
    }
    is_clear = not parts or parts[0] not in sections or "_" in last
    most = max(shared.values(), default=0)
    return [SYNONYMS[theirs] for theirs, number in shared.items() if number == most and (number or is_clear)], False
