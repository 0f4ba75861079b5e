"""The registry of metrics: what each name in `metrics.jsonl` means, and what to change if it is not healthy.

`sops/reference/metrics.md` is generated from this table.
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

PLACEHOLDERS = {"<function>": "[^/]+", "<name>": "[^/]+", "<n>": "[0-9]+", "<k>": "[0-9]+"}
NOT_REPRODUCIBLE = ("time/", "perf/")
"""Prefixes of metrics that depend on clocks and devices; all others follow from the settings bit for bit."""


class Metric(NamedTuple):
    pattern: str
    """Names separated by commas; `{a,b}` stands for each of them, `<function>` and other `PLACEHOLDERS` for any."""
    meaning: str
    """The definition and unit of the metric."""
    healthy: str
    """The values of a healthy run."""
    remedy: str
    """What to change, or what it means, if the values are different."""

    @property
    def names(self) -> list[str]:
        """The names with braces expanded; placeholders remain."""
        return [name for pattern in self.pattern.split(", ") for name in expand_braces(pattern)]

    @property
    def is_reproducible(self) -> bool:
        return not self.pattern.startswith(NOT_REPRODUCIBLE)


def expand_braces(pattern: str) -> list[str]:
    """Returns `a/b_d` and `a/c_d` for `a/{b,c}_d`."""
    parts = re.split(r"(\{.*?\})", pattern)
    choices = [part.strip("{}").split(",") if part.startswith("{") else [part] for part in parts]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def matches(name: str, metric: str) -> bool:
    """Returns whether a metric of a run is meant by a name of the registry, which may have placeholders."""
    pattern = re.escape(name)
    for placeholder, expression in PLACEHOLDERS.items():
        pattern = pattern.replace(re.escape(placeholder), expression)
    return re.fullmatch(pattern, metric) is not None


def find_metric(metric: str) -> Metric | None:
    """Returns the registry's entry for a metric of a run; None if there is none."""
    return next((entry for entry in METRICS if any(matches(name, metric) for name in entry.names)), None)


def metrics_page() -> str:
    """Returns the glossary as Markdown."""
    rows = [
        f"| {', '.join(f'`{name}`' for name in entry.pattern.split(', '))} | {entry.meaning} | {entry.healthy} | "
        f"{entry.remedy} | {'yes' if entry.is_reproducible else 'no'} |"
        for entry in METRICS
    ]
    return "\n".join([*PAGE_HEAD, *rows, ""])


PAGE_HEAD = (
    "# Metrics",
    "",
    "All names that `metrics.jsonl` can hold. Numbers that are not finite are null there.",
    "Reproducible metrics follow bit for bit from the settings, if plug-ins do. Generated from",
    "`app/report/metric_registry.py`; edit the table there.",
    "",
    "| name | meaning | healthy | otherwise | reproducible |",
    "|---|---|---|---|---|",
)

# fmt: off
METRICS = (
    Metric("step", "training steps done; line 0 is the evaluation before the first",
        "rises by 1", "a gap: lines were deleted"),
    Metric("reward/mean, reward/std",
        "weighted reward of the step's samples, before a KL penalty is taken from it (`algorithm.kl_in: reward`)",
        "the mean rises over tens of steps", "read samples in `rollouts.html`: is the reward correct?"),
    Metric("reward/<function>/mean",
        "one reward function, or `model`, the reward model; unweighted, over the samples it gave a value for; a "
        "failure counts 0 with `reward.on_error: zero`; `overlong` is the length penalty",
        "those that count rise together", "one rises at another's cost: change the weights"),
    Metric("reward/<function>/error_count, reward/error_count",
        "samples it failed on; the total includes samples that all functions abstained from",
        "0", "read `reward_errors` in `rollouts/`"),
    Metric("reward/<function>/<name>/mean", "an additional number returned by a plug-in",
        "as defined by its author", "ask its author"),
    Metric("reward/abstained_count", "number of values that were None",
        "as intended", "a function that abstains often gives little signal"),
    Metric("reward/dropped_count",
        "samples left out by `reward.on_error: drop` or because their logits were not finite",
        "0", "fix the function that fails"),
    Metric("reward/zero_variance_fraction",
        "share of groups whose rewards are all equal, from which the policy learns nothing",
        "below 0.7", "easier or harder prompts, larger `rollout.group_size`"),
    Metric("reward/filtered_group_fraction",
        "share of the sampled groups that `algorithm.filter` left out; 0 without a filter",
        "below 0.7", "easier or harder prompts, larger `rollout.group_size`"),
    Metric("reward/sampled_mean", "mean reward before the filter; `reward/mean` is the mean after it",
        "rises, as without a filter", "as for `reward/mean`"),
    Metric("rollout/num_rounds", "rollouts of the step; 1 without a filter",
        "well below `algorithm.max_rounds`", "as for `reward/filtered_group_fraction`"),
    Metric("rollout/surplus_group_count", "groups that passed the filter but exceed the step, and are discarded",
        "below a step's groups", "nothing: the last round is rarely needed completely"),
    Metric("rollout/filler_group_count",
        "groups that did not pass the filter and fill the step, outside the loss, because `algorithm.max_rounds` "
        "was reached",
        "0", "raise `algorithm.max_rounds`, or choose other prompts"),
    Metric("completions/mean_length", "mean number of tokens of a completion",
        "settles, or grows slowly with the reward", "grows without it: the reward pays for length"),
    Metric("completions/{min,max}_length", "tokens of the shortest and the longest completion",
        "max below `rollout.max_new_tokens`", "min falls to 1 or 2: answers without reasoning are rewarded"),
    Metric("completions/truncated_fraction", "share of completions truncated at `rollout.max_new_tokens`",
        "below 0.1", "raise it, or reward short answers"),
    Metric("advantage/mean", "mean advantage over the tokens that the policy wrote in the step, before whitening",
        "near 0", "far from 0: better answers are longer (above) or shorter (below) than worse ones"),
    Metric("advantage/std", "standard deviation over the same tokens, before whitening",
        "0.3 to 1", "near 0: see `reward/zero_variance_fraction`"),
    Metric("returns/{mean,std}",
        "estimated future reward of each token, over the same tokens; only with per-token advantages",
        "the mean follows `reward/mean`", "the deviation is 0: all rewards are equal"),
    Metric("value/explained_variance",
        "share of the variance of the returns that the critic predicted: 1 − Var(returns − values) / "
        "Var(returns), over the same tokens (null if all returns are equal)",
        "rises from about 0 towards 1", "below 0: lower `critic.learning_rate`, or more `critic.warmup_steps`"),
    Metric("loss", "loss of the step; at ratio 1 it is minus the mean advantage",
        "near 0", "watch the reward instead"),
    Metric("policy/entropy", "nats per token",
        "falls slowly", "collapses: lower the learning rate, add `algorithm.beta` or `algorithm.entropy_coef`"),
    Metric("policy/kl",
        "nats per token to the starting model, by `algorithm.kl_estimator` (null while `algorithm.beta` is 0)",
        "below 0.1", "raise `algorithm.beta`"),
    Metric("policy/kl_coef", "weight of the penalty in the step's rewards (`algorithm.kl_in: reward`)",
        "steady, or settles with `algorithm.kl_target`",
        "it only rises: raise `algorithm.kl_target`, or lower the learning rate"),
    Metric("policy/grad_norm", "norm of the gradient before it is clipped at `optimizer.max_grad_norm`",
        "steady", "spikes: lower the learning rate"),
    Metric("policy/clip_fraction_{low,high}",
        "share of tokens whose gradient was clipped (with `clip: cispo`, whose weight was clipped); 0 with one "
        "update per step",
        "below 0.2; 0.1 to 0.5 together with `gspo`", "lower the learning rate, fewer `algorithm.epochs`"),
    Metric("policy/clip_fraction_dual", "the same for `algorithm.dual_clip`; 0 while that is off",
        "near 0", "fewer `algorithm.epochs`"),
    Metric("policy/correction_mean",
        "with `algorithm.correction`, like all rows down to `correction_ess`: mean weight of a token",
        "0.9 to 1.1", "lower `rollout.max_staleness` or the learning rate"),
    Metric("policy/correction_max", "largest weight before truncation",
        "below 10; with `correction_level: sequence` any", "the same"),
    Metric("policy/correction_cut_fraction", "share of tokens whose weight was truncated or masked",
        "below 0.1", "the same, or raise `algorithm.correction_max`"),
    Metric("policy/veto_fraction", "share of tokens in samples left out by `algorithm.correction_veto`",
        "0", "more than a percent on policy: sampler and update disagree"),
    Metric("policy/correction_ess", "(Σw)² / (n Σw²) of the n weights: effective sample size as a share of the tokens",
        "above 0.7", "lower `rollout.max_staleness`"),
    Metric("policy/ratio_max", "largest probability ratio; exactly 1 with one update per step",
        "below 10", "lower the learning rate, fewer `algorithm.epochs`"),
    Metric("policy/learning_rate", "learning rate of the last update",
        "follows `optimizer.schedule`", "change `optimizer.learning_rate`, `warmup_steps`, `final_fraction`"),
    Metric("policy/nonfinite_updates", "updates skipped for a NaN or infinite loss or gradient, so far",
        "0", "train in float32, lower the learning rate"),
    Metric("policy/nonfinite_in_a_row",
        "of those, the newest in a row; the run ends at `optimizer.max_nonfinite_steps`",
        "0", "the same"),
    Metric("value/loss",
        "the critic's loss: half the mean squared error of its values, clipped; everything under `value/` exists "
        "only with a critic",
        "falls, then follows the rewards", "stays high: raise `critic.learning_rate`, or `critic.warmup_steps`"),
    Metric("value/clip_fraction", "share of tokens whose value changed by `critic.clip_range`",
        "below 0.2", "raise `critic.clip_range`, or lower `critic.learning_rate`"),
    Metric("value/grad_norm", "norm of the gradient before it is clipped at `optimizer.max_grad_norm`",
        "steady", "spikes: lower `critic.learning_rate`"),
    Metric("value/learning_rate", "learning rate of the critic's last update",
        "follows `optimizer.schedule`", "change `critic.learning_rate`"),
    Metric("value/nonfinite_{updates,in_a_row}", "as for the policy",
        "0", "the same"),
    Metric("rollout/sampler_scorer_logprob_diff_{mean,max}", "nats between sampler and trainer on the same tokens",
        "in float32 max below 1e-4; in bfloat16 mean below 0.02; with `rollout.max_staleness` the policy has "
        "changed since as well, so any size is possible",
        "without `max_staleness`: float32; if that does not help, a bug: please report. With it see "
        "`policy/correction_ess`"),
    Metric("batching/fill", "share of the update's token positions that hold a token; the rest is padding",
        "above 0.9",
        "more samples per optimizer step, or a smaller `algorithm.max_tokens_per_device`: the last micro-batch is"
        " rounded up; 0.2 to 0.6 is usual with fixed rows"),
    Metric("batching/num_micro_batches", "micro-batches of the update, over its mini-batches",
        "as few as memory allows", "raise `algorithm.max_tokens_per_device`"),
    Metric("batching/dummy_fraction", "share of the update's rows without a sample",
        "near 0", "fewer samples than devices: more prompts per step"),
    Metric("batching/over_quota", "devices and rows over their quota",
        "0, always", "a bug: please report"),
    Metric("batching/flops_imbalance", "work of the busiest device over the mean",
        "below 1.05", "more samples per optimizer step; `algorithm.balance_batch: true`"),
    Metric("global_seqlen/{min,max,mean,minmax_diff}",
        "tokens of an optimizer step per device if samples were distributed in order, prompts included",
        "depends on the data", "nothing: it is the baseline of balancing"),
    Metric("global_seqlen/balanced_{min,max}", "tokens per device after balancing, counted the same way",
        "close together", "the same as for `batching/flops_imbalance`"),
    Metric("value/batching/{fill,num_micro_batches,dummy_fraction,over_quota,flops_imbalance}",
        "the same for the critic's updates",
        "as for `batching/`", "as for `batching/`, with `critic.max_tokens_per_device`"),
    Metric("score/{policy,reference,critic,reward}/fill", "`batching/fill` of the role's scoring pass",
        "above 0.9", "as for `batching/fill`, with `score.max_tokens_per_device`"),
    Metric("score/{policy,reference,critic,reward}/num_micro_batches", "micro-batches of the pass",
        "as few as memory allows", "the same"),
    Metric("score/{policy,reference,critic,reward}/rows_per_device", "rows per device of its largest micro-batch",
        "steady", "lengths still reach new shapes"),
    Metric("eval/accuracy",
        "share of held-out answers that are correct, greedy by default, by the task of the first reward function;"
        " if that is a plug-in, the mean of its own value over the answers it did not abstain from (null if there"
        " is none); an answer that could not be generated is wrong",
        "rises beyond its 95 % interval", "it stays while the reward rises: overfitted, or a reward that can be gamed"),
    Metric("eval/accuracy/difficulty_<n>", "the same, by the data's `difficulty`",
        "hard prompts follow the easy ones", "more prompts of the weak level"),
    Metric("eval/pass@<k>",
        "with `eval.num_samples` above 1, like the next: share of held-out prompts with a correct answer among k "
        "samples, k = 2, 4, 8, ... and all (null if the judge gives other values than 0 and 1)",
        "above `eval/accuracy`, and not falling",
        "falls while the accuracy rises: the policy only sharpens what it could do before"),
    Metric("eval/maj@<n>",
        "share of held-out prompts whose most frequent answer among n samples is correct (absent if the judge "
        "names no answer)",
        "above `eval/accuracy`", "far above: more steps can still gain that much"),
    Metric("eval/format_rate", "share of held-out answers in the requested format (null if a plug-in judges)",
        "near 1", "a rise in accuracy with format alone is not skill"),
    Metric("eval/truncated_fraction", "share of held-out answers that are truncated",
        "near 0", "raise `rollout.max_new_tokens`"),
    Metric("eval/mean_length", "mean number of tokens of a held-out answer",
        "near `completions/mean_length`", "compare `eval.temperature` with `rollout.temperature`"),
    Metric("eval/error_count", "held-out samples that the reward failed on; they count 0",
        "0", "read `reward_errors` in `eval/`"),
    Metric("time/{rollout,reward,score,advantage,update}_s",
        "wall clock of each phase; with `rollout.max_staleness`, `rollout` is the time that the step waited for "
        "samples",
        "rollout and update dominate",
        "a slow reward: simplify it; slow scoring: larger `score.max_tokens_per_device`"),
    Metric("time/score_{policy,reference,critic,reward}_s",
        "wall clock of a role's scoring pass, part of `time/score_s`; the reward model's of `time/reward_s`",
        "below the update's third", "a larger `score.max_tokens_per_device`"),
    Metric("time/step_s", "wall clock of the step, including saving its samples, without evaluation and checkpoint",
        "steady", "spikes: see `perf/compilations`"),
    Metric("time/eval_s", "wall clock of the evaluation",
        "small compared with the steps in between", "larger `eval.every_steps`, smaller `eval.num_prompts`"),
    Metric("perf/tokens_per_s", "completion tokens over the whole step's time",
        "steady", "more samples per step fill the devices better"),
    Metric("perf/flops",
        "floating-point operations of the step: 2 N per token forward and 6 N forward and backward: every rollout"
        " round, scoring and updates of policy, reference and critic; attention and a reward model are not "
        "counted",
        "steady", "nothing: `perf/mfu` is computed from it"),
    Metric("perf/rollout/segments",
        "decode segments without a host round trip, per host; one per rollout without `rollout.slots`",
        "a few for each sample that a slot gets", "raise `rollout.segment.min`, or `rollout.segment.overhead_steps`"),
    Metric("perf/rollout/prefill_tokens_saved",
        "prompt tokens not prefilled because a sample of the same prompt shared them, minus tokens prefilled "
        "again after a suspension",
        "near (`rollout.group_size` − 1) × a step's prompt tokens",
        "below: more prompts wait than the pool holds, `rollout.prompts_per_step`"),
    Metric("perf/rollout/bubble",
        "share of row steps in which the row was done or empty; with `rollout.scheduler`, share of the slots' "
        "time in which no row decoded",
        "below 0.2 with `rollout.slots`; 0.5 to 0.8 without, if lengths differ",
        "set `rollout.slots` to a fraction of a step's samples; fewer workers if they share a device"),
    Metric("perf/rollout/makespan_s",
        "with `rollout.scheduler`, like all rows down to `repacked_tokens`: seconds from the first submission to "
        "the last token, summed over the rollouts of a step; with `rollout.max_staleness`, from one round's end "
        "to the next",
        "most of `time/rollout_s`", "the rest is compilation and moving weights"),
    Metric("perf/rollout/tail_fraction",
        "share of the makespan after 90 % of the samples were done; null with `rollout.max_staleness`",
        "below 0.3", "`rollout.scheduler: adaptive`; fewer slots, so that work still waits"),
    Metric("perf/rollout/probe_recall",
        "share of the longest fifth of the samples, without probes, that was predicted to be long at its start "
        "(null if no sample was longer, and under `sync`)",
        "above 0.5 if samples of a prompt are alike",
        "low by nature if a prompt's samples differ as much as prompts do"),
    Metric("perf/rollout/breaker_trips", "samples that reached the limit of a fast worker and moved",
        "a few percent of the samples", "raise `rollout.pdsr.fast_limit_tokens`"),
    Metric("perf/rollout/stolen", "samples that started on a worker of the other kind",
        "any number", "many of one kind: change `rollout.workers.*.count`"),
    Metric("perf/rollout/repacked_tokens", "tokens that were computed again because a cache was lost with its worker",
        "0", "read the warning that a worker failed"),
    Metric("perf/rollout/staleness_mean, perf/rollout/staleness_max",
        "with `rollout.max_staleness`: age, in steps, of the policy that sampled the tokens of the step",
        "between 0 and `rollout.max_staleness`, which no token exceeds",
        "lower `rollout.max_staleness` if `reward/mean` suffers"),
    Metric("perf/mfu",
        "`perf/flops` in `time/step_s`, as a share of the devices' peak (null if the peak is unknown, as on a CPU)",
        "the higher the better", "larger `algorithm.max_tokens_per_device`"),
    Metric("perf/peak_memory_bytes", "highest memory use so far, of the fullest device; of the whole process on a CPU",
        "flat after the first steps", "smaller `algorithm.max_tokens_per_device`, `model.remat: block`"),
    Metric("perf/compilations", "XLA compilations in the step",
        "0 after the first steps", "lengths still reach new buckets"),
    Metric("perf/score_{policy,reference,critic,reward}_compilations",
        "the part of these in a role's scoring pass: one for each new shape of rows",
        "0 after the first steps", "the same"),
)
