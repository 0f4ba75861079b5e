"""What TRL and verl call our settings, for the errors about unknown names."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import NamedTuple

TABLE = (files("settings") / "loading" / "synonyms.txt").read_text(encoding="utf-8")
"""What the tables of `sops/migrate/` say; its first lines describe the format."""

HISTORIC_NAMES = ("grad_accum_steps",)
"""Names of the historic runner that have no field in `ALIASES`. Of the others, those with a dot are verl's."""
VERL_ROOT = "actor_rollout_ref."


class Synonym(NamedTuple):
    """A setting of another program."""

    title: str
    """Such as `TRL's num_generations`."""
    fields: tuple[str, ...]
    """The settings that it is here; empty if there are none."""
    remark: str
    """How to convert its value, or what there is instead; may be empty."""


def _read_table() -> Iterator[tuple[str, Synonym]]:
    for line in TABLE.splitlines():
        if line.startswith("#"):
            continue
        here, names, *remark = (" ".join(cell.split()) for cell in line.split("|"))
        for name in names.split(", "):
            program = "the historic runner" if name in HISTORIC_NAMES else "verl" if "." in name else "TRL"
            fields = () if here == "–" else tuple(here.split())
            yield name.removeprefix(VERL_ROOT), Synonym(f"{program}'s {name}", fields, "".join(remark))


SYNONYMS = dict(_read_table())


def find_synonyms(name: str, sections: Collection[str]) -> tuple[list[Synonym], bool]:
    """Returns the settings of other programs that a name may be, and whether it is exactly one.

    Otherwise they have the same last part and share most of the other parts. A short name inside one of our `sections`
    must share a part: `critic.lr` is verl's `critic.optim.lr`, but `critic.epsilon` is not TRL's `epsilon`.
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
