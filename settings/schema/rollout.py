"""The settings of scheduling rollouts: segments, P-DSR and workers."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from settings.schema.section import Section

MAX_TOKENS = 2**24
"""Of a limit or a budget; beyond this it is a slip of the pen."""
MAX_SLOTS = 2**16
MAX_STALENESS = 64
RAY_LEASE_S = 600.0
"""Longer than a segment takes, and than a user waits."""

DecodeLayout = Literal["gathered", "fsdp"]
"""Values of `rollout.decode_layout`."""


class SegmentSettings(Section):
    """How many tokens a worker decodes before it looks up."""

    rule: Literal["auto", "budget", "balance"] = Field(
        default="auto",
        description="Length of a segment: capacity / active rows (budget), or where an edge costs what finished rows "
        "idle (balance); auto is balance while samples wait for slots, else budget.",
    )
    min: int = Field(default=64, ge=1, le=MAX_TOKENS, description="Tokens of a row in a segment, at least.")
    max: int = Field(default=4096, ge=1, le=MAX_TOKENS, description="Tokens of a row in a segment, at most.")
    capacity: int = Field(
        default=8192, ge=1, le=MAX_TOKENS, description="Tokens of all rows in a segment, for the rule budget."
    )
    overhead_steps: float = Field(
        default=0.5,
        gt=0,
        le=1000,
        description="What the edge of a segment costs, in decode steps, for the rule balance.",
    )


class PdsrSettings(Section):
    """Probe-based dynamic segment rollout: who is long, and what follows."""

    unit: Literal["tokens", "seconds"] = Field(
        default="tokens",
        description="What samples are ranked, judged and limited by. Seconds depend on the machine's load, and so does "
        "the schedule then.",
    )
    heavy_percent: float = Field(
        default=10.0,
        gt=0,
        lt=100,
        description="pdsr_v1: prompts whose probes are longest, and whose samples go to heavy.",
    )
    probe_limit_tokens: int = Field(
        default=1024, ge=1, le=MAX_TOKENS, description="pdsr_v1: a probe this long is handed over, its prompt heavy."
    )
    probe_limit_s: float = Field(default=5.0, gt=0, description="The same where the unit is seconds.")
    fast_limit_tokens: int = Field(
        default=2048,
        ge=1,
        le=MAX_TOKENS,
        description="pdsr_v1, pdsr_v2: a sample this long leaves its fast worker for a heavy one.",
    )
    fast_limit_s: float = Field(
        default=10.0, gt=0, description="The same in seconds, beside the tokens, where the unit is seconds."
    )
    on_fast_limit: Literal["suspend", "truncate"] = Field(
        default="suspend",
        description="pdsr_v1: hand the sample over, or end it there, which changes what hard prompts are rewarded for.",
    )
    percentile: float = Field(
        default=80.0, gt=0, lt=100, description="Samples beyond this percentile of the window are heavy."
    )
    window: int = Field(
        default=256, ge=1, le=MAX_SLOTS, description="Finished samples that the percentile is taken of."
    )
    window_min: int = Field(default=32, ge=1, le=MAX_SLOTS, description="No verdict before this many have finished.")


class WorkerPoolSettings(Section):
    count: int = Field(default=1, ge=0, le=4096, description="Workers of this kind; 0 = none.")
    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, strict=False)] | None = Field(
        default=None,
        description="Numbers of this host's devices that they share out evenly; those that no other worker names when "
        "null. On a single device all workers take turns.",
    )
    slots: int = Field(default=8, ge=1, le=MAX_SLOTS, description="Rows that each of them decodes at once.")


class WorkersSettings(Section):
    fast: WorkerPoolSettings = WorkerPoolSettings()
    heavy: WorkerPoolSettings = WorkerPoolSettings()
    lease_s: float | None = Field(
        default=None,
        gt=0,
        description="A worker that is silent for so many seconds in a segment is given up, and its samples go on "
        "elsewhere; any time when null. With `rollout.pool: ray` 600 when null. Not where one thread drives workers of "
        "this host; null with `rollout.max_staleness` there.",
    )
    deterministic: bool = Field(
        default=False,
        description="One thread drives all workers in turn, so that a rollout is scheduled the same every time; on a "
        "single device it always does.",
    )


def _validate_ray_address(value: str) -> str:
    if value != "auto" and not re.fullmatch(r"[^\s/]+:[0-9]{1,5}", value):
        raise ValueError("expected `host:port` of a cluster's head, as in `10.0.0.2:6379`, or `auto`")
    return value


class RayActorSettings(Section):
    """What an actor takes of the machine that it runs on."""

    num_cpus: float = Field(default=1.0, ge=0, le=4096, description="Cores that Ray counts for each of them.")
    num_gpus: float = Field(default=0.0, ge=0, le=64, description="GPUs of each of them.")
    memory_gb: float | None = Field(
        default=None, gt=0, le=2**16, description="Main memory of each, in GiB, which Ray counts; none when null."
    )
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={},
        description="What else each takes, as `{TPU: 4}`, or as machines were started with to tell them apart: "
        "`{large_memory: 1}`.",
    )


class RayPoolSettings(Section):
    """Where the actors of `rollout.pool: ray` run."""

    address: Annotated[str, AfterValidator(_validate_ray_address)] | None = Field(
        default=None,
        description="`host:port` of a cluster's head, or `auto` for the cluster that this machine has joined; null: "
        "several processes on this machine, for as long as the run.",
    )
    start_timeout_s: float = Field(
        default=900.0, gt=0, le=86_400, description="For all actors to start, and for each to compile or take weights."
    )
    fast: RayActorSettings = RayActorSettings()
    heavy: RayActorSettings = RayActorSettings()


class RolloutSettings(Section):
    prompts_per_step: int = Field(default=8, ge=1, description="Prompts of a step, per host.")
    group_size: int = Field(default=8, ge=1, description="Samples per prompt.")
    max_new_tokens: int = Field(default=64, ge=1, description="Longest completion, in tokens.")
    max_length_total: int | None = Field(
        default=None,
        ge=2,
        description="Prompt + completion, in tokens; max_new_tokens + max(128, max_prompt_length) when null.",
    )
    prefill_length_min: int = Field(default=16, ge=1, description="Smallest prefill bucket, in tokens.")
    temperature: float = Field(default=1.0, ge=0, description="0 = greedy (refused in training).")
    top_k: int = Field(default=0, ge=0, description="Keep the k likeliest tokens; 0 = all.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Keep the likeliest tokens that hold this mass; 1 = all.")
    min_p: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Keep tokens at least this likely relative to the likeliest; 0 = all.",
    )
    slots: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SLOTS,
        description="Samples that a host decodes at once: whenever one is done, the next waiting one takes its slot. "
        "All of a rollout at once, until the longest is done, when null. Lower it when caches fill the memory.",
    )
    mode: Literal["exact", "fast"] = Field(
        default="fast",
        description="With slots or workers: caches and batches as large as they need to be (fast), or always of one "
        "size in float32 (exact), so that no sample depends, bit for bit, on when it was generated and beside which "
        "others.",
    )
    scheduler: Literal["sync", "pdsr_v1", "pdsr_v2", "adaptive"] | None = Field(
        default=None,
        description="Who decides what the workers of `rollout.workers` do: a batch to its end, P-DSR of either "
        "version, or longest expected first. No workers when null: all samples at once, or through `rollout.slots`.",
    )
    placement: Literal["island", "global"] = Field(
        default="island",
        description="Each host generates on its own devices and waits for no other meanwhile (island), or all hosts "
        "generate one batch on all devices, without slots or workers (global). On one host they differ only with the "
        "scheduler sync: workers, or one batch.",
    )
    decode_layout: DecodeLayout = Field(
        default="gathered",
        description="Weights while tokens are drawn: whole on every device but for tp (gathered), or still split over "
        "fsdp, which holds less and moves all weights between the devices for every token.",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=MAX_STALENESS,
        description="Optimizer steps by which the policy that drew a token may be older than the one that learns from "
        "it; 0 = on policy: generation waits for training and training for generation. Above 0 generation never "
        "waits, with `rollout.scheduler` only, and a resumed run repeats itself no more. Training alone reads it.",
    )
    pool: Literal["local", "ray"] = Field(
        default="local",
        description="Where the workers of `rollout.workers` run: on this host's devices, or each in a Ray actor of "
        "`rollout.ray`, on other machines or in processes here.",
    )
    segment: SegmentSettings = SegmentSettings()
    pdsr: PdsrSettings = PdsrSettings()
    workers: WorkersSettings = WorkersSettings()
    ray: RayPoolSettings = RayPoolSettings()

    @property
    def has_workers(self) -> bool:
        """Workers on devices of their own, rather than one batch or one queue over all of a host's or of all hosts'."""
        return self.scheduler is not None and self.placement == "island"
