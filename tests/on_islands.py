"""Samples on several hosts in every way, also while the other hosts sample nothing.

`python -m tests.on_islands MODEL OUT [--set mesh....=...]...` writes its results to OUT as JSON.
"""

import json
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from app.distributed.collective_files import host_slice
from app.distributed.collectives import gather_bytes_over_hosts
from app.distributed.stop_check import StoppedError
from app.mesh import jax_startup
from app.mesh.device_mesh import to_host_submesh
from app.mesh.program_cache import CompilationCounter
from app.records.sample import Prompt, Sample
from app.runtime.model_spec import read_model_spec
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from app.training.inputs import read_training_inputs
from settings import load

TINY = (
    *("data.max_prompt_length=16", "data.num_problems=40", "eval.every_steps=0", "checkpoint.best_metric=null"),
    *("rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=24", "rollout.segment.min=4"),
    *("model.dtype=float32", "rollout.segment.max=8"),
)
WORKER = ("rollout.workers.fast.slots=16", "rollout.workers.heavy.count=0")
WAYS = {
    "global": ("rollout.placement=global",),
    "island": (),
    "global with tp": ("rollout.placement=global", "rollout.mesh=tp=2"),
    "island with tp": ("rollout.mesh=dp=4,tp=2",),
    "slots": ("rollout.slots=4", "rollout.mode=exact"),
    "slots of all hosts": ("rollout.slots=4", "rollout.mode=exact", "rollout.placement=global"),
    "adaptive": ("rollout.scheduler=adaptive", "rollout.mode=exact", *WORKER),
}
"""Ways to generate; `sync` is added for the worker of `adaptive`."""
NUM_PROMPTS = 4


class Found:
    """Samples one model in every way, on all hosts that have joined."""

    def __init__(self, model: Path, *mesh: str):
        self._overrides = [f"model.path={model}", *TINY, *mesh]
        settings = load(None, self._overrides, {}).settings
        jax_startup.initialize_distributed(settings.mesh)
        self._model = read_model_spec(settings)
        prompts = read_training_inputs(settings).prompts
        self.prompts: list[Prompt] = [prompts[i] for i in host_slice(NUM_PROMPTS)]

        self._sessions: dict[str, Session] = {}

    def session(self, way: str) -> Session:
        """Returns the same session each time, so that programs compile once."""
        if way not in self._sessions:
            settings = load(None, [*self._overrides, *WAYS[way]], {}).settings
            self._sessions[way] = Session.open(ScoringSession.open(settings, self._model))
        return self._sessions[way]

    def samples(self, way: str) -> list[Sample]:
        session = self.session(way)
        weights = session.to_decode_weights(session.scoring.load_params())
        return session.generator.generate(weights, self.prompts, session.rollout_request(policy_version=1))

    def samples_under_sync(self) -> list[Sample]:
        workers = self.session("adaptive").workers
        assert workers is not None
        adaptive, workers.schedule = workers.schedule, replace(workers.schedule, policy="sync")
        samples = self.samples("adaptive")
        workers.schedule = adaptive
        return samples


def describe(samples: list[Sample]) -> list[tuple[str, list[int], str]]:
    return [(s.uid, s.completion_ids.tolist(), s.finish_reason) for s in samples]


def counted(most: int) -> Callable[[], bool]:
    calls = iter(range(most))
    return lambda: next(calls, None) is None


def stopped(found: Found, way: str, stop_requested: Callable[[], bool]) -> str:
    session = found.session(way)
    weights = session.to_decode_weights(session.scoring.load_params())
    session.stop_when(stop_requested)
    try:
        session.generator.generate(weights, found.prompts, session.rollout_request(policy_version=1))
    except StoppedError:
        return "stopped"
    return "went on"


def buffers(tree: Any) -> list[dict[int, int]]:
    """Returns, for each array, the address of its buffer on each device."""
    return [
        {shard.device.id: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
        for array in jax.tree.leaves(tree)
        if array.size
    ]


def taken(found: Found) -> dict[str, Any]:
    """Returns whether an island uses the buffers of the training mesh, and the arrays on each device."""
    session = found.session("island")
    params = session.scoring.load_params()
    with jax.set_mesh(session.mesh):
        whole = session.to_decode_weights.lay_out(params)
    weights = to_host_submesh(whole, session.to_decode_weights.mesh)
    return {
        "same buffers": buffers(whole) == buffers(weights),
        "num arrays": len(buffers(weights)),
        "devices of the mesh": session.mesh.size,
        "devices of an array": sorted({len(array.sharding.device_set) for array in jax.tree.leaves(weights)}),
        "are local": all(array.is_fully_addressable for array in jax.tree.leaves(weights)),
    }


def main(model: str, out: str, *options: str) -> None:
    found = Found(Path(model), *options[1::2])  # the values after each --set
    is_second = jax.process_index() == 1
    results: dict[str, Any] = {"taken": taken(found)}
    for way in WAYS:
        samples = found.samples(way)
        results[way] = describe(samples)
        results[f"workers of {way}"] = sorted({s.worker for s in samples})
    results["sync"] = describe(found.samples_under_sync())
    # An island does not wait for other hosts: only the second host generates again.
    session = found.session("island")
    weights = session.to_decode_weights(session.scoring.load_params())
    if is_second:
        results["alone"] = describe(
            session.generator.generate(weights, found.prompts[:1], session.rollout_request(policy_version=1))
        )
    # Converting the weights of another version runs the same program without compiling it again.
    params = session.scoring.load_params()
    with closing(CompilationCounter()) as compilations:
        session.to_decode_weights(params)
        results["compilations of a second version"] = compilations.take_count()
    # Only the second host is asked to stop; with global generation, both hosts stop.
    results["stopped"] = {
        way: stopped(found, way, counted(2) if is_second else counted(1000)) for way in ("global", "island", "adaptive")
    }
    results["together again"] = [
        json.loads(one) for one in gather_bytes_over_hosts(json.dumps(jax.process_index()).encode())
    ]
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
