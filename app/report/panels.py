"""The plots of a run in the order of the page: what each shows, how to read it, what to say where it has no data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.report.alerts import MISMATCH_THRESHOLD
from app.report.plots import (
    DrawFunction,
    PlotData,
    draw_accuracy,
    draw_clipping,
    draw_counts,
    draw_lengths,
    draw_line,
    draw_reward,
    draw_share,
    draw_times,
)

GIB = 2**30


@dataclass(frozen=True)
class Panel:
    name: str
    """Of its PNG and its place in the page."""
    title: str
    caption: str
    """How to read it: what is healthy, what to change."""
    absent: str
    """Said where there is nothing to plot."""
    is_present: Callable[[PlotData], bool]
    draw: DrawFunction
    height: float = 2.7
    """Inches."""


def has_values(*names: str) -> Callable[[PlotData], bool]:
    """Any of the metrics has a number."""
    return lambda evidence: any(len(evidence.series(name)) for name in names)


def has_nonzero_values(*names: str) -> Callable[[PlotData], bool]:
    """Any of the metrics is ever something else than 0."""
    return lambda evidence: any(evidence.series(name).values.any() for name in names)


PANELS = (
    Panel(
        "reward",
        "Reward",
        "Should rise over tens of steps; single steps are noise. If it rises while accuracy does not, the reward "
        "is being gamed: read some samples.",
        "No step has a reward.",
        has_values("reward/mean"),
        draw_reward,
    ),
    Panel(
        "accuracy",
        "Held-out accuracy",
        "Share of right answers on prompts that are never trained on; where a plug-in judges, the mean of its values. "
        "Differences within the interval are chance: raise eval.num_prompts to narrow it.",
        "No evaluation: eval.every_steps is 0, or no step had one yet.",
        has_values("eval/accuracy"),
        draw_accuracy,
    ),
    Panel(
        "lengths",
        "Completion lengths, and the share that is cut",
        "Above: shortest, mean and longest completion of a step. Below: the share cut at rollout.max_new_tokens; "
        "over 10 % raise it, or reward short answers.",
        "No completion lengths were recorded.",
        has_values("completions/mean_length"),
        draw_lengths,
        height=3.6,
    ),
    Panel(
        "entropy",
        "Entropy",
        "How undecided the policy is. A slow fall is learning; a sudden fall to nearly 0 is collapse: lower "
        "optimizer.learning_rate, raise algorithm.clip_high, or set algorithm.beta.",
        "No entropy was recorded.",
        has_values("policy/entropy"),
        draw_line("policy/entropy", "nats per token", noisy=True),
    ),
    Panel(
        "zero_variance",
        "Groups whose rewards are all equal",
        "Share of prompts whose samples all got the same reward. Near 100 % the reward teaches nothing: prompts are "
        "too easy or too hard, or rollout.group_size is too small.",
        "Not recorded.",
        has_values("reward/zero_variance_fraction"),
        draw_share("reward/zero_variance_fraction", "groups"),
    ),
    Panel(
        "reward_failures",
        "Rewards that gave no value",
        "Failures of reward functions, values that were None, and samples left out by reward.on_error: drop. Failures "
        "should be 0: read reward_errors in rollouts/, and try `grpo score --role reward` on a file there.",
        "None: no failure, abstention or left-out sample was recorded.",
        has_nonzero_values("reward/error_count", "reward/abstained_count", "reward/dropped_count"),
        draw_counts(
            {
                "reward/error_count": "failures",
                "reward/abstained_count": "abstentions",
                "reward/dropped_count": "samples left out",
            },
            "number a step",
        ),
    ),
    Panel(
        "kl",
        "KL to the starting model",
        "How far the policy has moved. Below 0.1 is usual; if it runs away, raise algorithm.beta or lower "
        "optimizer.learning_rate.",
        "Not measured: with algorithm.beta at 0 there is no reference model to compare with.",
        has_values("policy/kl"),
        draw_line("policy/kl", "nats per token", noisy=True),
    ),
    Panel(
        "grad_norm",
        "Gradient norm",
        "Before the clip at optimizer.max_grad_norm. Steady is healthy; growing spikes ask for a lower "
        "optimizer.learning_rate.",
        "No gradient norm was recorded, or none was finite.",
        has_values("policy/grad_norm"),
        draw_line("policy/grad_norm", "norm", noisy=True),
    ),
    Panel(
        "clip_fractions",
        "Clipped tokens",
        "Tokens whose ratio left the trust region, or met algorithm.dual_clip, so that their gradient was cut. Above "
        "20 %: lower optimizer.learning_rate or algorithm.epochs.",
        "Nothing was clipped. With one update a step the ratio is exactly 1, and nothing can be.",
        has_nonzero_values("policy/clip_fraction_low", "policy/clip_fraction_high", "policy/clip_fraction_dual"),
        draw_clipping,
    ),
    Panel(
        "sampler_mismatch",
        "Sampler against trainer",
        "Mean difference of their logprobs on the same tokens, in nats. About 1e-7 in float32 and below "
        f"{MISMATCH_THRESHOLD:g} in bfloat16; more means that the gradient is of another policy than the one that "
        f"sampled, as is "
        "meant with rollout.max_staleness.",
        "Not recorded.",
        has_values("rollout/sampler_scorer_logprob_diff_mean"),
        draw_line("rollout/sampler_scorer_logprob_diff_mean", "nats per token"),
    ),
    Panel(
        "times",
        "Where the time goes",
        "Seconds of each phase, one on the other; shares are of the whole run. `rest` is saving samples and metrics.",
        "No times were recorded.",
        has_nonzero_values("time/step_s"),
        draw_times,
    ),
    Panel(
        "tokens_per_s",
        "Speed",
        "Completion tokens over the time of the whole step. Slow steps compile: see below.",
        "No speed was recorded.",
        has_values("perf/tokens_per_s"),
        draw_line("perf/tokens_per_s", "tokens per second", noisy=True),
    ),
    Panel(
        "memory",
        "Peak memory so far",
        "Of the fullest device; of the whole process on a CPU. Too much: smaller algorithm.max_tokens_per_device, "
        "or model.remat: block.",
        "The devices do not say how much memory they use.",
        has_values("perf/peak_memory_bytes"),
        draw_line("perf/peak_memory_bytes", "GiB", scale=GIB),
    ),
    Panel(
        "compilations",
        "Compilations",
        "XLA programs compiled in each step. Should be 0 after the first steps; later ones come from lengths that "
        "were not met before.",
        "Nothing was compiled.",
        has_nonzero_values("perf/compilations"),
        draw_counts({"perf/compilations": "compilations"}, "programs"),
    ),
)
