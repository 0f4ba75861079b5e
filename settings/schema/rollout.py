"""Settings of rollouts: sampling, segments, P-DSR, workers and Ray."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from settings.schema.section import Section

MAX_TOKENS = 2**24
"""Upper bound of token limits, to catch typos."""
MAX_SLOTS = 2**16
MAX_BLOCKS = 2**31 - 1
MAX_STALENESS = 64
PDSR_WINDOW_MIN = 32
"""Number of finished samples required before their lengths set the threshold for heavy samples."""

RolloutWeights = Literal["int8"]
"""Values of `rollout.weights` other than null."""
KVCacheType = Literal["int8"]
"""Values of `rollout.kv_cache` other than null."""
ROUNDING_SETTINGS = ("rollout.weights", "rollout.kv_cache")
"""Settings that make the sampler a quantized version of the policy."""


class SegmentSettings(Section):
    """Bounds on a segment, the number of tokens per row that a worker decodes before it accepts new samples.

    If no samples wait for slots, a segment is the number of tokens that the KV cache holds, divided by the number of
    rows. Otherwise its length balances the overhead of ending segments against the idle time of finished rows.
    """

    min: int = Field(default=64, ge=1, le=MAX_TOKENS)
    """Minimum length of a segment, in tokens per row; a worker accepts new samples between segments. Raise it if many
    short segments cause overhead."""
    max: int = Field(default=4096, ge=1, le=MAX_TOKENS)
    """Maximum length of a segment, in tokens per row; a worker accepts new samples between segments. Lower it if
    finished rows stay idle for long."""


def _check_window(value: Any) -> Any:
    if isinstance(value, int) and value < PDSR_WINDOW_MIN:
        raise ValueError(
            f"expected at least {PDSR_WINDOW_MIN} samples; with fewer there is no threshold, and pdsr_v1 would only "
            "rank the probes of the current step"
        )
    return value


class PdsrSettings(Section):
    """Settings of P-DSR (probe-based dynamic segment rollout): when samples count as long and move to heavy workers."""

    unit: Literal["tokens", "seconds"] = "tokens"
    """Unit in which P-DSR ranks and limits samples. With seconds, the schedule depends on the load of the machine."""
    heavy_percent: float = Field(default=10.0, gt=0, lt=100)
    """With pdsr_v1, percentage of prompts that are heavy because their probes (first samples) are the longest; samples
    of heavy prompts go to heavy workers. Once 32 samples have finished, prompts are also heavy if their probe is longer
    than the (100 - heavy_percent)th percentile of the last `rollout.pdsr.window` samples."""
    probe_limit_tokens: int = Field(default=1024, ge=1, le=MAX_TOKENS)
    """With pdsr_v1, a probe (the first sample of a prompt) that reaches this many tokens moves to a heavy worker, and
    its prompt counts as heavy."""
    fast_limit_tokens: int = Field(default=2048, ge=1, le=MAX_TOKENS)
    """With pdsr_v1 and pdsr_v2, a sample that reaches this many tokens moves from its fast worker to a heavy one. With
    pdsr_v2, a sample that a fast worker stole from a heavy one returns after a quarter of this limit."""
    fast_limit_s: float = Field(default=10.0, gt=0)
    """With pdsr_v1 and pdsr_v2 and `rollout.pdsr.unit: seconds`, a sample also leaves its fast worker after this many
    seconds, and a probe of pdsr_v1 after half as many."""
    on_fast_limit: Literal["suspend", "truncate"] = "suspend"
    """What pdsr_v1 does with a sample at the limit of a fast worker: continue it on a heavy worker (suspend) or end it
    (truncate), which biases the rewards of hard prompts."""
    percentile: float = Field(default=80.0, gt=0, lt=100)
    """With pdsr_v2 and adaptive, samples that are longer than this percentile of the last `rollout.pdsr.window` samples
    are heavy."""
    window: Annotated[int, BeforeValidator(_check_window)] = Field(default=256, ge=PDSR_WINDOW_MIN, le=MAX_SLOTS)
    """Number of most recently finished samples, including earlier steps, whose lengths set the threshold for heavy
    samples, and whose mean length sets the segment length. Until 32 samples have finished, there is no threshold, and
    pdsr_v1 only ranks probes."""


class WorkerPoolSettings(Section):
    count: int = Field(default=1, ge=0, le=4096)
    """Number of workers of this kind. Without Ray, the devices of the host are divided equally among all its workers;
    workers on a single device take turns."""
    slots: int = Field(default=8, ge=1, le=MAX_SLOTS)
    """Number of samples that each worker decodes at once. More slots decode more tokens per second but need more
    memory."""


class FastWorkerSettings(WorkerPoolSettings):
    max_length: int | None = Field(default=None, ge=2, le=MAX_TOKENS)
    """Maximum length of prompt plus completion on a fast worker, in tokens. A lower value makes its KV cache smaller,
    and longer samples continue on heavy workers. If null, the longest possible sample fits."""


class WorkersSettings(Section):
    fast: FastWorkerSettings = FastWorkerSettings()
    heavy: WorkerPoolSettings = WorkerPoolSettings()


def _validate_ray_address(value: str) -> str:
    if value not in ("auto", "local") and not re.fullmatch(r"[^\s/]+:[0-9]{1,5}", value):
        raise ValueError("expected `auto`, `local`, or `host:port` of a cluster's head, as in `10.0.0.2:6379`")
    return value


RayResources = dict[str, Annotated[float, Field(gt=0)]]


class RayPoolSettings(Section):
    """The Ray cluster in which the workers of `rollout.workers` run, and the resources that they need."""

    address: Annotated[str, AfterValidator(_validate_ray_address)] | None = None
    """Runs the workers of `rollout.workers` as Ray actors: in the cluster with its head at `host:port`, in the cluster
    that this machine has joined (`auto`), or in a temporary one on this machine (`local`). If null, they run on this
    host's devices without Ray."""
    fast_resources: RayResources = Field(default={"CPU": 1.0})
    """Resources that Ray reserves for each fast worker, such as `{GPU: 1}` or `{TPU: 4}`. Custom resources, such as
    `{large_memory: 1}`, select machines."""
    heavy_resources: RayResources = Field(default={"CPU": 1.0})
    """Resources that Ray reserves for each heavy worker, in the form of `rollout.ray.fast_resources`."""


def format_rounding(rounding: Mapping[str, str]) -> str:
    """Formats `RolloutSettings.rounding` as words for a message, such as `rollout.weights: int8`."""
    return " and ".join(f"{name}: {value}" for name, value in rounding.items())


def _validate_stop_string(value: str) -> str:
    if not value or "\ufffd" in value:
        raise ValueError("expected at least one character, and no U+FFFD, which replaces incomplete characters")
    return value


def _auto_or_count(most: int, *, or_null: bool = False) -> BeforeValidator:
    def validate(value: Any) -> Any:
        if value == "auto" or (or_null and value is None) or (type(value) is int and 1 <= value <= most):
            return value
        raise ValueError(f"expected auto{', null' if or_null else ''} or an integer from 1 to {most}")

    return BeforeValidator(validate)


def _validate_rollout_devices(value: Any) -> Any:
    if type(value) in (int, float) and not 0 < value < 1:
        raise ValueError("expected a fraction above 0 and below 1, or a list of device indices")
    if not isinstance(value, list | tuple):
        return value
    if not value or len(set(value)) < len(value) or any(type(one) is not int or one < 1 for one in value):
        raise ValueError("expected different device indices above 0, because device 0 of each host trains")
    return tuple(sorted(value))


def _validate_rollout_mesh(value: str) -> str:
    value = value.replace(" ", "")
    if value not in ("auto", "training") and not re.fullmatch(r"(dp=[1-9][0-9]{0,5},)?tp=[1-9][0-9]{0,5}", value):
        raise ValueError("expected `auto`, `training`, or sizes as in `dp=2,tp=4` or `tp=4`")
    return value


class RolloutSettings(Section):
    prompts_per_step: int = Field(default=8, ge=1, le=2**20)
    """Number of prompts per training step on each host. Each prompt gets `rollout.group_size` samples."""
    group_size: int = Field(default=8, ge=1, le=2**16)
    """Samples per prompt, which group-relative algorithms compare; 8 is usual."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum length of a completion in tokens, also with `algorithm.name: sft`. The default is 512 for models that are
    not built in."""
    stop: Annotated[tuple[Annotated[str, AfterValidator(_validate_stop_string)], ...], Field(strict=False)] = ()
    """Strings that end a completion, also in evaluations. The completion ends with the token that completes a string,
    and counts as finished. Control tokens are matched by name, such as `<|im_end|>`."""
    max_length_total: int | None = Field(default=None, ge=2)
    """Maximum length of prompt plus completion, in tokens. If null, it is the sum of `rollout.max_new_tokens` and
    `data.max_prompt_length`, which counts as at least 128."""
    prefill_length_min: int = Field(default=16, ge=1)
    """Minimum length, in tokens, to which prompts are padded for prefill. Raise it to compile fewer programs."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature. 0 always selects the most likely token, which is not allowed in training."""
    top_k: int = Field(default=0, ge=0, lt=2**31)
    """Samples only from the k most likely tokens; 0 samples from all tokens."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Samples only from the fewest tokens whose probabilities sum to at least this value; 1 samples from all tokens."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Samples only from tokens whose probability is at least this fraction of the highest probability; 0 samples from
    all tokens."""
    slots: Annotated[int | Literal["auto"], _auto_or_count(MAX_SLOTS)] = "auto"
    """Number of samples that a host decodes at once without workers (continuous batching): when one finishes, the next
    one starts. `auto` uses one slot for every sample of a step, but at most as many as `rollout.kv_blocks` can hold at
    half their full length; the number is logged at the start."""
    kv_blocks: Annotated[int | Literal["auto"] | None, _auto_or_count(MAX_BLOCKS, or_null=True)] = "auto"
    """Number of KV-cache blocks on each device; samples of a prompt share its full blocks. If blocks run out, the
    newest sample is preempted, and its cache is recomputed later. Null gives every slot enough for its full length;
    `auto` does too, but without workers gives fewer if weights, optimizer and compiled programs leave less memory."""
    mode: Literal["exact", "fast"] = "fast"
    """`fast` adapts shapes to the samples. `exact` uses fixed shapes in float32, so that each sample is bitwise
    independent of the schedule and of the other samples."""
    scheduler: Literal["sync", "pdsr_v1", "pdsr_v2", "adaptive"] | None = None
    """How the workers of `rollout.workers` are scheduled: whole batches (sync), probe-based dynamic segment rollout
    (P-DSR: pdsr_v1 or pdsr_v2), or longest expected sample first (adaptive). If null, there are no workers, and samples
    are generated in `rollout.slots`."""
    placement: Literal["island", "global"] = "island"
    """Whether each host generates on its own devices independently (island), or all hosts generate from one queue in
    slots on all devices, without workers (global). On one host it matters only with `rollout.scheduler: sync`, which
    then uses workers (island) or slots (global)."""
    mesh: Annotated[str, AfterValidator(_validate_rollout_mesh)] = "auto"
    """How generation splits the devices of `mesh.shape`: rows over dp and weights over tp, as in `dp=2,tp=4` or `tp=4`.
    `training` keeps the tp of `mesh.shape`. `auto` does too, except on TPUs without workers if a larger tp is estimated
    to take at least 30 % less time per token."""
    weights: RolloutWeights | None = None
    """Dtype of the layers' matrices during generation, also in evaluations; if null, it is `model.dtype`. int8 halves
    the bytes read per token compared with bfloat16, but the sampler then differs from the trained policy, which
    `algorithm.correction` corrects."""
    kv_cache: KVCacheType | None = None
    """Dtype of the KV cache, also in evaluations; if null, it is `model.dtype`, or float32 on CPUs. int8 takes about
    half the memory of bfloat16, but the sampler then differs from the trained policy, which `algorithm.correction`
    corrects."""
    routing_replay: bool = False
    """For a mixture of experts, records the experts of each token during generation and reuses them in scoring and
    updates, where rounding would choose others for some tokens. All samples of a prompt use one sample's routes for the
    prompt's tokens. It takes one byte per token, layer and active expert in memory (384 bytes per token for
    Qwen3-30B-A3B), and makes `rollouts/` a third larger."""
    devices: Annotated[float | tuple[int, ...] | None, BeforeValidator(_validate_rollout_devices)] = None
    """Devices of each host that only generate while the other devices train, with `rollout.max_staleness` above 0: a
    fraction such as 0.5, or their indices on every host, such as `[2, 3]`. `mesh.shape` is then the mesh of the
    training devices, and `rollout.mesh: tp=N` splits the weights of a worker over N devices. If null, generation and
    training take turns on the same devices. Only training uses this setting."""
    max_staleness: int = Field(default=0, ge=0, le=MAX_STALENESS)
    """Maximum age, in training steps, of the policy that sampled a token used for training. 0 is on-policy: generation
    and training alternate. Above 0 they overlap, which requires `rollout.scheduler`, and a resumed run is no longer
    reproducible. Only training uses this setting."""
    segment: SegmentSettings = SegmentSettings()
    pdsr: PdsrSettings = PdsrSettings()
    workers: WorkersSettings = WorkersSettings()
    ray: RayPoolSettings = RayPoolSettings()

    @property
    def has_workers(self) -> bool:
        """Whether workers with their own devices generate samples, rather than the slots of one queue."""
        return self.scheduler is not None and self.placement == "island"

    @property
    def uses_ray(self) -> bool:
        """Whether workers are Ray actors."""
        return self.ray.address is not None

    @property
    def rounding(self) -> dict[str, str]:
        """The settings in `ROUNDING_SETTINGS` that are not null, with their values."""
        values = {name: getattr(self, name.partition(".")[2]) for name in ROUNDING_SETTINGS}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def rows_together(self) -> int | None:
        """Number of rows in each matmul of a decode step, so that workers with different slot counts round alike.

        None if all workers have the same slots and lengths, or if samples need not be bitwise reproducible.
        """
        fast, heavy = self.workers.fast, self.workers.heavy
        has_both = fast.count > 0 and heavy.count > 0
        is_unequal = has_both and (fast.slots != heavy.slots or fast.max_length is not None)
        return math.gcd(fast.slots, heavy.slots) if is_unequal and self.mode == "exact" and self.has_workers else None

    @property
    def num_rows(self) -> int:
        """Number of samples that a host without workers decodes at once if its memory allows."""
        return self.slots if isinstance(self.slots, int) else self.prompts_per_step * self.group_size
