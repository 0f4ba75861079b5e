"""The plots of a run in the order of the page, with titles, captions and texts for missing data."""

from __future__ import annotations

from dataclasses import dataclass

from app.report.alerts import MISMATCH_THRESHOLD
from app.report.plots import Plot, draw_accuracy, draw_lengths, draw_reward, draw_times, lines

GIB = 2**30


@dataclass(frozen=True)
class Panel:
    """One plot of the report."""

    name: str
    """Name of its PNG file and its anchor in the page."""
    title: str
    caption: str
    """How to read the plot: what is healthy and what to change."""
    plot: Plot
    height: float = 2.7
    """Height in inches."""


PANELS = (
    Panel(
        "reward",
        "Reward",
        "The reward should rise over tens of steps; single steps are noise. If it rises while accuracy does not, the "
        "policy exploits the reward function: read some samples.",
        Plot(("reward/mean",), draw_reward),
    ),
    Panel(
        "accuracy",
        "Held-out accuracy",
        "Share of right answers to prompts not used for training; if a plug-in judges, the mean of its values. "
        "Differences within the interval may be chance: raise eval.num_prompts to narrow it.",
        Plot(("eval/accuracy",), draw_accuracy),
    ),
    Panel(
        "lengths",
        "Completion lengths and truncated share",
        "Top: shortest, mean and longest completion of a step. Bottom: share truncated at rollout.max_new_tokens; if "
        "it is above 10 %, raise that limit or reward short answers.",
        Plot(("completions/mean_length",), draw_lengths),
        height=3.6,
    ),
    Panel(
        "entropy",
        "Entropy",
        "Entropy of the policy. A slow fall is normal; a sudden fall to nearly 0 is a collapse: lower "
        "optimizer.learning_rate, raise algorithm.clip_high, or set algorithm.beta.",
        lines({"policy/entropy": "nats per token"}, "nats per token", noisy=True),
    ),
    Panel(
        "zero_variance",
        "Groups whose rewards are all equal",
        "Share of prompts whose samples all got the same reward. Near 100 % the reward gives no learning "
        "signal: prompts are too easy or too hard, or rollout.group_size is too small.",
        lines({"reward/zero_variance_fraction": "share"}, "groups", axis="shares", noisy=True),
    ),
    Panel(
        "reward_failures",
        "Samples without a reward value",
        "Failures of reward functions, None values, and samples dropped by reward.on_error: drop. There should be no "
        "failures: read reward_errors in rollouts/, and run `grpo score --role reward` on a file there.",
        lines(
            {
                "reward/error_count": "failures",
                "reward/abstained_count": "None values",
                "reward/dropped_count": "dropped samples",
            },
            "number per step",
            axis="counts",
            needs_nonzero=True,
        ),
    ),
    Panel(
        "kl",
        "KL to the initial model",
        "KL of the policy to the initial model. Below 0.1 is usual; if it keeps growing, raise algorithm.beta "
        "or lower optimizer.learning_rate.",
        lines({"policy/kl": "nats per token"}, "nats per token", noisy=True),
    ),
    Panel(
        "grad_norm",
        "Gradient norm",
        "Norm before clipping to optimizer.max_grad_norm. A steady norm is healthy; if spikes grow, lower "
        "optimizer.learning_rate.",
        lines({"policy/grad_norm": "norm"}, "norm", noisy=True),
    ),
    Panel(
        "clip_fractions",
        "Clipped tokens",
        "Share of tokens whose gradient is limited because their ratio left the clip range or reached "
        "algorithm.dual_clip. If it is above 20 %, lower optimizer.learning_rate or algorithm.epochs.",
        lines(
            {
                "policy/clip_fraction_low": "below 1 − clip_low",
                "policy/clip_fraction_high": "above 1 + clip_high",
                "policy/clip_fraction_dual": "above dual_clip",
            },
            "tokens",
            axis="shares",
            needs_nonzero=True,
        ),
    ),
    Panel(
        "sampler_mismatch",
        "Difference between sampler and trainer",
        "Mean difference between their logprobs of the same tokens, in nats: about 1e-7 in float32 and below "
        f"{MISMATCH_THRESHOLD:g} in bfloat16; if it is larger, the gradient is not that of the policy that generated "
        "the samples. With rollout.max_staleness, rollout.weights or rollout.kv_cache a difference is expected.",
        lines({"rollout/sampler_scorer_logprob_diff_mean": "difference"}, "nats per token"),
    ),
    Panel(
        "times",
        "Where the time goes",
        "Seconds of each phase, stacked, with shares of the whole run. `rest` is the saving of samples and metrics.",
        Plot(("time/step_s",), draw_times, needs_nonzero=True),
    ),
    Panel(
        "tokens_per_s",
        "Speed",
        "Completion tokens per second of the whole step. Steps that compile programs are slow: see below.",
        lines({"perf/tokens_per_s": "tokens per second"}, "tokens per second", noisy=True),
    ),
    Panel(
        "memory",
        "Peak memory so far",
        "Memory of the device that uses most; on a CPU, of the whole process. To reduce it, lower "
        "algorithm.max_tokens_per_device or set model.remat: block.",
        lines({"perf/peak_memory_bytes": "GiB"}, "GiB", scale=GIB),
    ),
    Panel(
        "compilations",
        "Compilations",
        "XLA programs compiled in each step. There should be none after the first steps; later ones are caused by new "
        "sequence lengths.",
        lines({"perf/compilations": "compilations"}, "programs", axis="counts", needs_nonzero=True),
    ),
)
