"""A training step's seconds on paper: models and TPU slices from one cost model, beside the historic 12 to 13.5 s.

    python scripts/bench/paper_scaling.py [--out FILE.json]

Nothing is measured. Decoding is reckoned by `scripts/simulate/cost_model.py`, FLOPs by `app/model/flops.py`,
chips by `app/mesh/chips.py`; every other assumption is printed, in two sets, of which the second is the
careful one.
Baseline of the ratios: the historic runner, which took 12 to 13.5 s a step of Qwen2.5-3B on v6e-8 (rollout 9.5 s,
update 3.9 s), as its runbook says; not measured again. How long its completions were is not known: at most 1024 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from shapes import QWEN2_5_0_5B, QWEN2_5_1_5B, QWEN2_5_3B, QWEN2_5_7B

from app.batching.micro_batch_shapes import bucket_length
from app.mesh.chips import TpuChip, TpuSlice, parse_slice
from app.model.architecture import Architecture
from app.model.decoder import DecoderDefinition
from app.model.flops import forward_flops
from scripts.simulate.cost_model import CostModel

MODELS = {"0.5B": QWEN2_5_0_5B, "1.5B": QWEN2_5_1_5B, "3B": QWEN2_5_3B, "7B": QWEN2_5_7B}
SLICES = ("v6e-8", "v4-16", "v5e-8")
SAMPLES, GROUP, PROMPT, NEW = 128, 8, 200, 1024
"""Sizes of a step over all chips, in samples and tokens; every completion has the maximum length."""
PREFILL_BUCKET, QUOTA = 512, 16_384
"""Padded length of a prompt, and `algorithm.max_tokens_per_device`."""
NUM_GROUPS = SAMPLES // GROUP
SEGMENT = 256
HISTORIC = {"step": (12.0, 13.5), "rollout": 9.5, "update": 3.9}
BF16, F32 = 2, 4


@dataclass(frozen=True)
class Assumptions:
    hbm: float
    """Fraction of the memory's peak rate for reading weights and caches."""
    links: float
    """Fraction of the peak rate of a chip's links for a gather, which overlaps with nothing."""
    prefill: float
    """Fraction of peak FLOP/s of passes without gradients: prefill and scoring."""
    update: float
    """Fraction of peak FLOP/s of the forward and backward pass."""
    layer_s: float
    """Seconds per layer of a decode step beyond reads and products: latency of small operations."""
    host_s: float
    """Seconds per step on the hosts: rewards, packing, logs."""


SETS = {
    "expected": Assumptions(hbm=0.75, links=0.7, prefill=0.5, update=0.40, layer_s=15e-6, host_s=0.3),
    "careful": Assumptions(hbm=0.50, links=0.4, prefill=0.3, update=0.25, layer_s=40e-6, host_s=1.0),
}
FIXED = (
    f"{SAMPLES} samples a step in groups of {GROUP}, prompts of {PROMPT} tokens, all completions {NEW} long, no "
    "sample dropped; one update on policy with beta 0, so nothing is scored (score*: a reference's pass, not counted)",
    "every chip holds 1/n of float32 weights and two moments (fsdp = n, also across the 2 hosts of v4-16, whose chips "
    "are linked as inside one), and decodes n-th of the rows, by bfloat16 weights",
    "a decode step: all weights read once (of an untied embedding, some rows), 2 FLOPs a weight and row at the peak, "
    "logits read 6 times in float32, the whole padded cache read",
    f"caches padded to the ladder, prompts to {PREFILL_BUCKET}; an edge of 1.5 ms every {SEGMENT} tokens",
    "gathered decoding: (n-1)/n of the bfloat16 weights into each chip, once a step; fsdp-decode: at every token",
    f"update: prompts shared by their groups, micro-batches of {QUOTA:,} tokens a chip, blocks and LM head computed "
    "forward twice and backward once (4 x forward); per micro-batch float32 weights gathered twice, gradients "
    "scattered once; AdamW reads or writes 28 bytes a weight",
    "fits: weights, moments, the decoding copy and the caches; and weights, moments, two sets of gradients; with 10 % "
    "of the memory left for all else",
)


@dataclass(frozen=True)
class Step:
    """Seconds of the phases of a step."""

    rollout: float
    score_if_referred: float
    """Seconds of scoring by a reference model, if beta is above 0; not in `total`."""
    update: float
    weight_gather: float
    host: float
    rollout_by_fsdp_decode: float

    @property
    def total(self) -> float:
        return self.rollout + self.update + self.weight_gather + self.host


@dataclass(frozen=True)
class Paper:
    """One model on one slice."""

    architecture: Architecture
    place: TpuSlice
    assumed: Assumptions

    @property
    def chip(self) -> TpuChip:
        return self.place.chip

    @property
    def num_weights(self) -> int:
        return DecoderDefinition.create(self.architecture).num_parameters

    @property
    def rows(self) -> int:
        return SAMPLES // self.place.num_chips

    @property
    def cache_length(self) -> int:
        return bucket_length(PROMPT + NEW, min_bucket=PREFILL_BUCKET)

    @property
    def cached_token_bytes(self) -> int:
        a = self.architecture
        return 2 * a.num_layers * a.num_kv_heads * a.head_dim * BF16

    @property
    def head_weights(self) -> int:
        return self.architecture.vocab_size * self.architecture.model_dim

    def link_s(self, num_bytes: float) -> float:
        """Returns the seconds in which each chip sends or receives n - 1 of n parts of this many bytes."""
        n = self.place.num_chips
        return (n - 1) / n * num_bytes / (self.assumed.links * self.chip.ici_bytes_per_s)

    def hbm_s(self, num_bytes: float) -> float:
        return num_bytes / (self.assumed.hbm * self.chip.hbm_bytes_per_s)

    def cost(self) -> CostModel:
        """Returns the cost model of decoding on one chip."""
        read = self.num_weights - (0 if self.architecture.tied_embeddings else self.head_weights)
        logits = 6 * self.architecture.vocab_size * F32
        return CostModel(
            step_s=self.hbm_s(read * BF16) + self.architecture.num_layers * self.assumed.layer_s,
            step_row_s=2 * read / self.chip.flops + self.hbm_s(logits),
            step_cached_token_s=self.hbm_s(self.cached_token_bytes),
            prefill_token_s=2 * read / (self.assumed.prefill * self.chip.flops),
        )

    def rollout_s(self) -> float:
        cost, prompts = self.cost(), math.ceil(self.rows / GROUP)
        read = cost.prefill(prompts * PREFILL_BUCKET) + cost.admit(self.rows)
        steps = NEW * cost.step(rows=self.rows, cache_length=self.cache_length)
        return read + steps + math.ceil(NEW / SEGMENT) * cost.segment_s

    def forward_s(self) -> float:
        """Returns the seconds of one pass over the samples at the peak of all chips."""
        of_prompt, of_sample = forward_flops(self.architecture)(np.asarray([PROMPT, PROMPT + NEW])).tolist()
        blocks = GROUP * (of_sample - of_prompt) + of_prompt
        head = 2 * self.head_weights * GROUP * NEW
        return (blocks + head) * NUM_GROUPS / self.place.num_chips / self.chip.flops

    def gathers_s(self, number: int) -> float:
        """Returns the seconds of gathering float32 weights; scattering gradients takes one more gather."""
        tokens = NUM_GROUPS * (PROMPT + GROUP * NEW) / self.place.num_chips
        return math.ceil(tokens / QUOTA) * number * self.link_s(F32 * self.num_weights)

    def step(self) -> Step:
        gather, rollout = self.link_s(BF16 * self.num_weights), self.rollout_s()
        optimizer = self.hbm_s(28 * self.num_weights / self.place.num_chips)
        return Step(
            rollout=rollout,
            score_if_referred=self.forward_s() / self.assumed.prefill + self.gathers_s(1),
            update=4 * self.forward_s() / self.assumed.update + self.gathers_s(3) + optimizer,
            weight_gather=gather,
            host=self.assumed.host_s,
            rollout_by_fsdp_decode=rollout + NEW * gather,
        )

    def peak_bytes(self) -> float:
        """Returns the peak bytes of everything that the assumptions name."""
        state = 3 * F32 * self.num_weights / self.place.num_chips
        caches = self.rows * self.cache_length * self.cached_token_bytes
        gradients = 2 * F32 * self.num_weights / self.place.num_chips
        return state + max(BF16 * self.num_weights + caches, gradients)

    @property
    def fits(self) -> bool:
        return self.peak_bytes() <= 0.9 * self.chip.hbm_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "paper_scaling.json")
    options = parser.parse_args()
    print("On paper, nothing measured. Assumed:")
    print("\n".join(f"- {line}" for line in FIXED))
    for name, assumed in SETS.items():
        print(f"- {name}: " + ", ".join(f"{key} {value:g}" for key, value in asdict(assumed).items()))
    places = {name: parse_slice(name) for name in SLICES}
    for place in places.values():
        chip = place.chip
        print(
            f"- {place.name}: {place.num_chips} chips on {place.num_hosts} host(s), each {chip.flops / 1e12:g} TFLOP/s,"
            f" HBM {chip.hbm_bytes / 2**30:g} GiB at {chip.hbm_bytes_per_s / 1e9:g} GB/s, links "
            f"{chip.ici_bytes_per_s / 1e9:g} GB/s"
        )
    low, high = HISTORIC["step"]
    print(f"\n{'seconds of a step':<24}" + "".join(f"{head:>11}" for head in HEADS))
    title, cells = "historic, 3B v6e-8", (f"{HISTORIC['rollout']:.2f}", "", f"{HISTORIC['update']:.2f}", "", "")
    print(f"{title:<24}" + "".join(f"{x:>11}" for x in (*cells, f"{low:g}-{high:g}", "baseline")))
    record = [one for model in MODELS for place in places.values() for one in both(model, place)]
    print("\n" + historic_lengths(places["v6e-8"]))
    told = {
        "date": datetime.now(UTC).date().isoformat(),
        "assumptions": FIXED,
        "sets": {name: asdict(one) for name, one in SETS.items()},
        "historic": HISTORIC,
        "chips": {name: asdict(place.chip) for name, place in places.items()},
        "cases": record,
    }
    options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def historic_lengths(place: TpuSlice) -> str:
    """Returns the token steps of the historic runner by this model, which decoded by fsdp."""
    paper = Paper(MODELS["3B"], place, SETS["expected"])
    by_fsdp = paper.step().rollout_by_fsdp_decode / NEW
    steps = HISTORIC["rollout"] / by_fsdp
    return (
        f"The historic rollout, {HISTORIC['rollout']} s, is {steps:.0f} token steps of fsdp-decode by the expected set:"
        " its longest completions were shorter than allowed, or its links gave more than assumed."
    )


HEADS = ("rollout", "score*", "update", "gather", "host", "step", "/ historic", "by fsdp")
"""Headings; the last is the rollout if weights were gathered at every token."""


def both(model: str, place: TpuSlice) -> list[dict[str, Any]]:
    """Prints one line for each set of assumptions."""
    found = []
    for name, assumed in SETS.items():
        paper = Paper(MODELS[model], place, assumed)
        case = {"model": model, "slice": place.name, "assumed": name, "peak_bytes": paper.peak_bytes()}
        title = f"{model} {place.name} {name}"
        needed = f"{paper.peak_bytes() / 2**30:.1f} of {paper.chip.hbm_bytes / 2**30:g} GiB"
        if not paper.fits:
            print(f"{title:<24}  does not fit by gathered decoding: {needed}")
            found.append(case | {"fits": False})
            continue
        step = paper.step()
        low, high = (step.total / x for x in reversed(HISTORIC["step"]))
        over = f"{low:.2f}-{high:.2f}" if model == "3B" else "-"
        cells = (step.rollout, step.score_if_referred, step.update, step.weight_gather, step.host, step.total)
        print(
            f"{title:<24}" + "".join(f"{x:>11.2f}" for x in cells) + f"{over:>11}{step.rollout_by_fsdp_decode:>11.1f}"
        )
        found.append(
            case | {"fits": True, "seconds": asdict(step) | {"step": step.total}, "cost": paper.cost().to_json()}
        )
    return found


if __name__ == "__main__":
    main()
