"""The registry of metrics: the meaning of each name in `metrics.jsonl`, and what to change if it is not healthy.

`sops/reference/metrics.md` is generated from this table.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import NamedTuple

PLACEHOLDERS = {"<function>": "[^/]+", "<name>": "[^/]+", "<n>": "[0-9]+", "<k>": "[0-9]+"}


class Metric(NamedTuple):
    pattern: str
    """Comma-separated names; `{a,b}` expands to both, and `PLACEHOLDERS` such as `<function>` match any name."""
    meaning: str
    healthy: str
    remedy: str
    """What to change if the values are not healthy, or what unhealthy values mean."""

    @property
    def names(self) -> list[str]:
        """The names with braces expanded; placeholders remain."""
        return [name for pattern in self.pattern.split(", ") for name in expand_braces(pattern)]


def expand_braces(pattern: str) -> list[str]:
    """Returns `a/b_d` and `a/c_d` for `a/{b,c}_d`."""
    parts = re.split(r"(\{.*?\})", pattern)
    choices = [part.strip("{}").split(",") if part.startswith("{") else [part] for part in parts]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def matches(name: str, metric: str) -> bool:
    """Returns whether a metric of a run matches a name of the registry, which may contain placeholders."""
    return _expression(name).fullmatch(metric) is not None


@functools.cache
def _expression(name: str) -> re.Pattern[str]:
    parts = re.split(f"({'|'.join(PLACEHOLDERS)})", name)
    return re.compile("".join(PLACEHOLDERS.get(part) or re.escape(part) for part in parts))


def find_metric(metric: str) -> Metric | None:
    """Returns the registry entry of a metric, or None if it has none."""
    return next((entry for entry in METRICS if any(matches(name, metric) for name in entry.names)), None)


# fmt: off
METRICS = (
    Metric("step", "completed training steps; line 0 is the evaluation before the first",
        "rises by 1", "a gap: lines were deleted"),
    Metric("reward/mean, reward/std",
        "weighted reward of the step's samples, before any KL penalty (`algorithm.kl_in: reward`); 0 if a teacher "
        "gives the only learning signal; with `algorithm.name: sft`, no metric under `reward/`, `rollout/`, "
        "`completions/`, `advantage/` or `mismatch/` exists",
        "the mean rises over tens of steps", "read samples in `rollouts.html` to check the reward"),
    Metric("reward/<function>/mean",
        "mean unweighted value of a reward function, of the reward model (`model`) or of the environment (`env`), over "
        "the samples with a value; failures count as 0 with `reward.on_error: zero`; `overlong` is the length penalty",
        "rewards with a weight rise together", "one rises at the expense of another: change the weights"),
    Metric("reward/<function>/error_count, reward/error_count",
        "number of samples on which the function failed; the total includes samples on which all functions abstained",
        "0", "read `reward_errors` in `rollouts/`"),
    Metric("reward/<function>/<name>/mean", "mean of an additional number returned by a plug-in",
        "as defined by its author", "ask its author"),
    Metric("reward/abstained_count", "number of times that a reward function returned None instead of a value",
        "as intended", "a function that abstains often gives little signal"),
    Metric("reward/dropped_count",
        "number of samples dropped by `reward.on_error: drop`, because their environment failed, or because their "
        "logits were not finite",
        "0", "fix the function or the environment that fails"),
    Metric("reward/zero_variance_fraction",
        "share of groups whose rewards are all equal; an estimator that compares the samples of a group learns nothing "
        "from them; null with one sample per prompt; `algorithm.mask_truncated` leaves out truncated samples",
        "below 0.7", "easier or harder prompts, larger `rollout.group_size`"),
    Metric("reward/<function>/zero_variance_fraction",
        "share of groups in which all values of the function are equal; this and the next metric exist only with "
        "`algorithm.reward_normalization: each_first`",
        "below 0.9", "the function teaches little: give it finer values, or weight 0"),
    Metric("advantage/<function>/share",
        "the function's share of the advantages, by the absolute values of weight × normalized value",
        "near its share of the weights", "near 0: its values are nearly always equal"),
    Metric("reward/filtered_group_fraction",
        "share of the sampled groups dropped by `algorithm.filter`; 0 without a filter",
        "below 0.7", "easier or harder prompts, larger `rollout.group_size`"),
    Metric("reward/sampled_mean", "mean reward before the filter; `reward/mean` is the mean after it",
        "rises", "as for `reward/mean`"),
    Metric("rollout/num_rounds", "number of rollouts in the step; 1 without a filter",
        "well below `algorithm.max_rounds`", "as for `reward/filtered_group_fraction`"),
    Metric("rollout/surplus_group_count", "number of groups that passed the filter but were not needed",
        "below the number of groups in a step", "nothing: the last round is rarely needed in full"),
    Metric("rollout/filler_group_count",
        "number of groups that did not pass the filter but fill the step, outside the loss, because "
        "`algorithm.max_rounds` was reached",
        "0", "raise `algorithm.max_rounds`, or choose other prompts"),
    Metric("data/epoch",
        "number of passes over the training prompts so far (in a mixture, over the prompts of all sources together); "
        "absent in a replay, which does not read the data set",
        "below 1 for a first run", "prompts repeat: use more data, and watch `eval/accuracy`"),
    Metric("data/seen_fraction",
        "share of the training prompts that have been sampled and graded so far; this and the next two metrics exist "
        "only with "
        "`data.curriculum`",
        "rises to 1", "far below 1 at the end: few prompts were used twice; use fewer prompts, or more steps"),
    Metric("data/pass_rate_mean",
        "mean running pass rate of the prompts seen: the accuracy of their samples, graded as in `eval/accuracy`",
        "rises", "read samples in `rollouts.html`, as for `reward/mean`"),
    Metric("data/pass_rate_{low,middle,high}_fraction",
        "share of the seen prompts whose running pass rate is below 0.1, from 0.1 to 0.9, above 0.9",
        "prompts move from low over middle to high",
        "few in the middle: nothing is left to learn from (high), or the prompts are too hard (low)"),
    Metric("data/num_tokens",
        "prompt and completion tokens of the step's samples over all rounds and hosts; a prompt counts once for each "
        "of its samples",
        "steady, or grows with the completions", "see `completions/mean_length`"),
    Metric("data/total_tokens", "sum of `data/num_tokens` since the first step", "rises", "nothing"),
    Metric("completions/mean_length", "mean number of tokens of a completion, observations of an environment included",
        "stays steady, or grows slowly with the reward", "grows while the reward does not: the reward favors length"),
    Metric("completions/{min,max}_length", "tokens of the shortest and the longest completion",
        "max below `rollout.max_new_tokens`", "min falls to 1 or 2: the reward favors answers without reasoning"),
    Metric("completions/truncated_fraction",
        "share of completions truncated at `rollout.max_new_tokens` or by another limit (see `episode/end/`)",
        "below 0.1", "raise that limit, or reward short answers"),
    Metric("completions/masked_token_fraction",
        "share of the policy's tokens left out of the loss; exists only with `algorithm.mask_truncated`",
        "below 0.2", "as for `completions/truncated_fraction`; at 1 a step learns nothing"),
    Metric("episode/turns_{mean,p90}",
        "mean and 90th percentile of the turns of a sample; everything under `episode/` and `env/` exists only with "
        "`env.source` or `env.tools`",
        "as many as the task needs", "see `episode/end/`"),
    Metric("episode/end/{terminated,truncated,turns,turn_tokens,tokens,observation,dropped}",
        "share of samples by how they ended: by the environment (the first two), at `env.max_turns`, "
        "`env.max_turn_tokens` or `rollout.max_new_tokens`, at an observation that did not fit, or because the "
        "environment failed",
        "`terminated` near 1", "raise the limit that is reached; dropped: see `reward/dropped_count`"),
    Metric("episode/{written,observed}_tokens_mean",
        "mean number of tokens per sample written by the policy, and observed (tool results, answers of the "
        "environment)",
        "written tokens grow slowly with the reward", "many observed tokens: lower `env.max_observation_tokens`"),
    Metric("episode/{tool_calls,tool_errors}_mean",
        "mean number of tool calls per sample, and of calls that raised an exception or were malformed",
        "errors fall", "errors do not fall: see `env.parser`, and the samples in `rollouts.html`"),
    Metric("env/score/<name>", "mean of a score that the environment returns; at most 32 scores are logged",
        "rises with `reward/env/mean`", "one rises at the expense of another: change the environment"),
    Metric("env/<name>", "mean of a number that the environment reports with its answers; at most 32 are logged",
        "as defined by its author", "ask its author"),
    Metric("advantage/mean", "mean advantage over the tokens that the policy generated in the step, before whitening "
        "and before a KL penalty in the advantage",
        "near 0", "far above 0: better answers are longer than worse ones; far below: they are shorter"),
    Metric("advantage/std", "standard deviation of the advantage over the tokens of `advantage/mean`, before whitening",
        "0.3 to 1", "near 0: see `reward/zero_variance_fraction`"),
    Metric("returns/{mean,std}",
        "mean and standard deviation of the returns over the tokens of `advantage/mean`; only with advantages per "
        "token",
        "the mean follows `reward/mean`", "the deviation is 0: all rewards are equal"),
    Metric("value/explained_variance",
        "share of the variance of the returns that the critic predicts: 1 − Var(returns − values) / "
        "Var(returns), over the tokens of `advantage/mean` (null if all returns are equal)",
        "rises from about 0 toward 1", "below 0: lower `critic.learning_rate`, or raise `critic.warmup_steps`"),
    Metric("loss",
        "loss of the step; at ratio 1 it equals minus the mean advantage; with `algorithm.name: sft` the "
        "cross-entropy, in nats per token",
        "near 0; with `sft` it falls", "watch the reward instead; `sft`: `eval/accuracy`"),
    Metric("policy/entropy", "entropy of the policy, in nats per token",
        "falls slowly", "collapses: lower the learning rate, add `algorithm.beta` or `algorithm.entropy_coef`"),
    Metric("policy/kl",
        "KL to the initial model, in nats per token, by `algorithm.kl_estimator` (null if `algorithm.beta` is 0, and "
        "with a teacher)",
        "below 0.1", "raise `algorithm.beta`"),
    Metric("policy/teacher_kl", "KL to the teacher, the model of `reference.path`, in nats per token",
        "falls under distillation", "does not fall: raise `optimizer.learning_rate`; rises: lower it"),
    Metric("policy/kl_coef",
        "weight of the KL penalty in the step's rewards or advantages (`algorithm.kl_in: reward` or `advantage`)",
        "steady, or converges with `algorithm.kl_target`",
        "keeps rising: raise `algorithm.kl_target`, or lower the learning rate"),
    Metric("policy/grad_norm", "norm of the gradient before it is clipped at `optimizer.max_grad_norm`",
        "steady", "spikes: lower the learning rate"),
    Metric("policy/clip_fraction_{low,high}",
        "share of tokens that the lower or upper bound on the ratio excludes from the gradient (with `clip: cispo`, "
        "whose weight it limits); 0 with one update per step",
        "below 0.2; for `gspo`, 0.1 to 0.5 together", "lower the learning rate or `algorithm.epochs`"),
    Metric("policy/clip_fraction_dual", "share of tokens clipped by `algorithm.dual_clip`; 0 if that is null",
        "near 0", "lower `algorithm.epochs`"),
    Metric("policy/correction_mean",
        "mean importance weight of a token; like the other metrics of the correction, only with `algorithm.correction`",
        "0.9 to 1.1", "lower `rollout.max_staleness` or the learning rate"),
    Metric("policy/correction_max", "largest importance weight before truncation",
        "below 10; any with `correction_level: sequence`", "as for `correction_mean`"),
    Metric("policy/correction_cut_fraction", "share of tokens whose importance weight was truncated or masked",
        "below 0.1", "as for `correction_mean`, or raise `algorithm.correction_max`"),
    Metric("policy/veto_fraction", "share of tokens in samples with weight 0 because of `algorithm.correction_veto`",
        "0", "above 1 % on-policy: sampler and update disagree"),
    Metric("policy/correction_ess", "effective sample size as a share of n tokens with weights w: (Σw)² / (n Σw²)",
        "above 0.7", "lower `rollout.max_staleness`, or set `rollout.weights` and `rollout.kv_cache` to null"),
    Metric("policy/ratio_max", "largest probability ratio; exactly 1 with one update per step",
        "below 10", "lower the learning rate or `algorithm.epochs`"),
    Metric("policy/learning_rate", "learning rate of the last update",
        "follows `optimizer.schedule`", "change `optimizer.learning_rate`, `warmup_steps`, `final_fraction`"),
    Metric("policy/nonfinite_updates", "updates skipped so far because of a NaN or infinite loss or gradient",
        "0", "set `model.dtype=float32`, lower the learning rate"),
    Metric("policy/nonfinite_in_a_row",
        "number of consecutive skipped updates up to now; the run ends at 3",
        "0", "as for `policy/nonfinite_updates`"),
    Metric("value/loss",
        "the critic's loss: half the mean squared error of its values, clipped; everything under `value/` exists "
        "only with a critic",
        "falls, then follows the rewards", "stays high: raise `critic.learning_rate`, or `critic.warmup_steps`"),
    Metric("value/clip_fraction", "share of tokens whose value changed by more than `critic.clip_range`",
        "below 0.2", "raise `critic.clip_range`, or lower `critic.learning_rate`"),
    Metric("value/grad_norm", "norm of the gradient before it is clipped at `optimizer.max_grad_norm`",
        "steady", "spikes: lower `critic.learning_rate`"),
    Metric("value/learning_rate", "learning rate of the critic's last update",
        "follows `optimizer.schedule`", "change `critic.learning_rate`"),
    Metric("value/nonfinite_{updates,in_a_row}", "like `policy/nonfinite_{updates,in_a_row}`, for the critic's updates",
        "0", "as for `policy/nonfinite_updates`"),
    Metric("rollout/sampler_scorer_logprob_diff_{mean,max}", "difference between sampler and trainer logprobs, in nats",
        "in float32 max below 1e-4; in bfloat16 mean below 0.02; with `rollout.weights` or `kv_cache` mean below "
        "0.1; any with `rollout.max_staleness`, because the policy has changed in the meantime",
        "without `max_staleness`: use float32, and null for `rollout.weights` and `kv_cache`; if that does not help, "
        "report a bug. With it: see "
        "`policy/correction_ess`"),
    Metric("rollout/sampler_scorer_kl", "KL between the sampler and the trained policy, in nats per token, by the "
        "estimator k3",
        "below 1e-3 in bfloat16, below 0.01 with `rollout.weights` or `kv_cache`", "as for the differences"),
    Metric("mismatch/{training,rollout}_ppl",
        "perplexity of the step's completions for the trainer (the policy's scoring pass, or else the update) and for "
        "the sampler: exp(−mean logprob of a sample's tokens), averaged over samples; metrics under `mismatch/` are "
        "defined as in verl",
        "nearly equal", "as for `rollout/sampler_scorer_logprob_diff_mean`"),
    Metric("mismatch/log_ppl_diff", "mean over samples of log(training perplexity / rollout perplexity)",
        "within 0.02 of 0", "as for `rollout/sampler_scorer_logprob_diff_mean`"),
    Metric("mismatch/{kl,k3_kl}",
        "KL of the sampler to the trainer over the step's tokens, in nats per token: the mean of d = sampler − trainer "
        "logprob (which can be negative), and of exp(−d) + d − 1 (which cannot)",
        "as for `rollout/sampler_scorer_kl`", "as for `rollout/sampler_scorer_logprob_diff_mean`"),
    Metric("rollout/route_difference",
        "share of (token, layer) pairs for which the trainer's router would choose other experts than the recorded "
        "ones, which are used; counted in the first update, where completion tokens are predicted; only with "
        "`rollout.routing_replay`; null for samples without records; if it is near 0, replay is not needed",
        "a few percent, with or without `rollout.max_staleness`",
        "the sampler's weights are old or rounded more: lower `rollout.max_staleness`; see `rollout.weights`"),
    Metric("rollout/fullest_expert",
        "token passes through the busiest expert of a layer relative to the mean over its experts, averaged over "
        "layers, "
        "counted like `rollout/route_difference`; only with a mixture of experts",
        "steady over the run", "rises: the samples become alike, since the router is frozen; see `policy/entropy`"),
    Metric("batching/fill", "share of the update's token positions that are not padding",
        "above 0.9",
        "more samples per optimizer step, or a smaller `algorithm.max_tokens_per_device`, because the last "
        "micro-batch is padded; 0.2 to 0.6 is usual with fixed rows"),
    Metric("batching/num_micro_batches", "number of micro-batches of the update, over all its mini-batches",
        "as few as memory allows", "raise `algorithm.max_tokens_per_device`"),
    Metric("batching/dummy_fraction", "share of the update's rows without a sample",
        "near 0", "fewer samples than devices: use more prompts per step"),
    Metric("batching/flops_imbalance", "FLOPs of the busiest device, relative to the mean",
        "below 1.05", "more samples per optimizer step; `algorithm.balance_batch: true`"),
    Metric("global_seqlen/{min,max,mean,minmax_diff}",
        "tokens, including prompts, that each device would get in an optimizer step if samples were distributed in "
        "order",
        "depends on the data", "nothing: this is the baseline for balancing"),
    Metric("global_seqlen/balanced_{min,max}",
        "tokens, including prompts, that each device gets in an optimizer step after balancing",
        "close together", "as for `batching/flops_imbalance`"),
    Metric("value/batching/{fill,num_micro_batches,dummy_fraction,flops_imbalance}",
        "as under `batching/`, for the critic's updates",
        "as for `batching/`", "as for `batching/`, with `critic.max_tokens_per_device`"),
    Metric("score/{policy,reference,critic,reward}/fill", "`batching/fill` of the role's scoring pass",
        "above 0.9", "as for `batching/fill`, with `score.max_tokens_per_device`"),
    Metric("score/{policy,reference,critic,reward}/num_micro_batches",
        "number of micro-batches of the role's scoring pass",
        "as few as memory allows", "raise `score.max_tokens_per_device`"),
    Metric("score/{policy,reference,critic,reward}/rows_per_device",
        "rows per device of the largest micro-batch of the role's scoring pass",
        "steady", "lengths still reach new shapes"),
    Metric("eval/accuracy",
        "share of held-out answers, greedy by default, that are correct by the task of the first reward function; "
        "if that is a plug-in, the mean of its values, without abstentions (null if there is no value); without "
        "functions, the mean reward of the environment; an answer that could not be generated counts as wrong",
        "rises beyond its 95 % interval", "flat while the reward rises: overfitting, or the reward is exploited"),
    Metric("eval/accuracy/difficulty_<n>", "accuracy on the prompts with this `difficulty` in the data",
        "hard prompts follow the easy ones", "use more prompts of the weak level"),
    Metric("eval/pass@<k>",
        "share of held-out prompts with a correct answer among k samples, k = 2, 4, 8, ... and all; only with "
        "`eval.num_samples` above 1; null if the first reward function returns values other than 0 and 1",
        "above `eval/accuracy`, and not falling",
        "falls while accuracy rises: the policy only becomes more certain of what it could solve before"),
    Metric("eval/maj@<n>",
        "share of held-out prompts whose most frequent answer among n samples is correct; only with "
        "`eval.num_samples` above 1; absent if the first reward function extracts no answers",
        "above `eval/accuracy`", "far above: accuracy can still rise that much with more steps"),
    Metric("eval/format_rate", "share of held-out answers in the requested format (null if a plug-in grades)",
        "near 1", "if accuracy rises only with the format, the policy has not become better at the task"),
    Metric("eval/truncated_fraction", "share of held-out answers that are truncated",
        "near 0", "raise `rollout.max_new_tokens`"),
    Metric("eval/mean_length", "mean number of tokens of a held-out answer",
        "near `completions/mean_length`", "compare `eval.temperature` with `rollout.temperature`"),
    Metric("eval/num_prompts", "number of held-out prompts",
        "hundreds", "wide intervals: raise `eval.num_prompts`"),
    Metric("eval/error_count", "number of held-out samples on which the reward failed; they count as 0",
        "0", "read `reward_errors` in `eval/`"),
    Metric("time/{rollout,reward,score,advantage,update,publish}_s",
        "wall-clock time of each phase; with `rollout.max_staleness`, `rollout` is the time that the step waited "
        "for samples, and `publish` converts the new weights and sends them to the workers",
        "rollout and update dominate; the plot `times` gives their shares of the run",
        "slow reward: simplify it; slow scoring: raise `score.max_tokens_per_device`"),
    Metric("time/env_turn_{p50,p99}_s", "median and 99th percentile of the time that the environment takes for a turn",
        "the 99th percentile far below `env.step_timeout_s`",
        "slow: more `plugins.workers` or `env.concurrency`, or a faster environment"),
    Metric("time/score_{policy,reference,critic,reward}_s",
        "wall-clock time of a role's scoring pass, part of `time/score_s`, or of `time/reward_s` for the reward model",
        "below a third of `time/update_s`", "raise `score.max_tokens_per_device`"),
    Metric("time/step_s", "wall-clock time of the step, including saving its samples, excluding evaluation and "
        "checkpoint",
        "steady", "spikes: see `perf/compilations`"),
    Metric("time/unix_s", "time at the end of the step and its evaluation, in seconds since 1970-01-01 UTC",
        "rises", "a large gap: the run was stopped and resumed"),
    Metric("time/eval_s", "wall-clock time of the evaluation",
        "small compared with the steps in between", "raise `eval.every_steps`, or lower `eval.num_prompts`"),
    Metric("perf/tokens_per_s", "completion tokens per second of the whole step",
        "steady", "use more samples per step, which fill the devices better"),
    Metric("perf/flops",
        "floating-point operations of the step's rollouts, scoring passes and updates. A forward pass takes 2 for each "
        "token and weight of the layers' matrices and adapters, 2 for each completion token and weight of the LM head, "
        "and 4 x head size for each layer, query head and visible pair of tokens. An update takes 3 times as many, "
        "with frozen matrices 2 times. A shared prompt counts once; padding and recomputation do not count",
        "steady", "nothing: this is only the basis of `perf/mfu`"),
    Metric("perf/rollout/segments",
        "number of segments per host; a segment is a sequence of decode steps without a round trip to the host",
        "a few per sample in a slot", "raise `rollout.segment.min`"),
    Metric("perf/rollout/prefill_tokens_saved",
        "prompt tokens not prefilled because samples of the same prompt share them, minus tokens prefilled "
        "again after a suspension or a preemption; each device prefills the prompts of its own samples",
        "near (`rollout.group_size` − 1) × a step's prompt tokens on one device",
        "far below on one device: see `perf/rollout/preemptions`"),
    Metric("perf/rollout/preemptions",
        "number of preemptions, in which a sample gives up its KV-cache blocks to older samples and is prefilled "
        "again later",
        "0, or a few in a hundred samples", "raise `rollout.kv_blocks`, or lower `rollout.slots`"),
    Metric("perf/rollout/bubble",
        "share of row steps in which the row was finished or empty; with `rollout.scheduler`, share of the slots' "
        "time in which no row decoded",
        "below 0.2 with fewer slots than samples; with as many 0.3 to 0.5 if lengths differ",
        "if fewer rows take less time, set `rollout.slots` to a fraction of a step's samples; use fewer workers if "
        "they share a device"),
    Metric("perf/rollout/makespan_s",
        "seconds from the first submission to the last token, summed over the rollouts of a step; with "
        "`rollout.max_staleness`, from the end of one round to the end of the next. This metric and those down to "
        "`repacked_tokens` exist only with `rollout.scheduler`",
        "most of `time/rollout_s`", "the rest is spent on compiling and moving weights"),
    Metric("perf/rollout/tail_fraction",
        "share of the makespan after 90 % of the samples were finished; null with `rollout.max_staleness`",
        "below 0.3", "use `rollout.scheduler: adaptive`, or fewer slots, so that samples still wait"),
    Metric("perf/rollout/probe_recall",
        "share of the longest fifth of the samples, not counting probes, that were predicted to be long when started "
        "(null if no sample was longer, and with `sync`)",
        "above 0.5 if samples of a prompt are alike",
        "always low if the samples of a prompt differ as much as those of different prompts"),
    Metric("perf/rollout/threshold", "length above which P-DSR last classified prompts as heavy, in "
        "`rollout.pdsr.unit`. This metric and those down to `last_verdict_tokens` are null with other schedulers",
        "near the percentile set in `rollout.pdsr`",
        "null: fewer samples have finished than a threshold needs"),
    Metric("perf/rollout/heavy_share",
        "share of the classified prompts whose samples were sent to heavy workers in the end",
        "near the heavy workers' share of the slots", "change `rollout.pdsr.percentile`, or `rollout.workers.*.count`"),
    Metric("perf/rollout/last_verdict_s",
        "seconds from the first submission until P-DSR last classified a prompt as heavy or not, or reclassified one "
        "because a sample reached its limit",
        "a small part of the makespan", "with `pdsr_v1`, lower `rollout.pdsr.probe_limit_tokens`"),
    Metric("perf/rollout/last_verdict_tokens", "tokens generated until the time of `last_verdict_s`",
        "a small part of the tokens", "as for `last_verdict_s`"),
    Metric("perf/rollout/breaker_trips", "number of samples that reached the limit of a fast worker and moved",
        "a few percent of the samples", "raise `rollout.pdsr.fast_limit_tokens`"),
    Metric("perf/rollout/truncated", "number of samples cut off at the limit of a fast worker "
        "(`rollout.pdsr.on_fast_limit: truncate`)",
        "few", "raise `rollout.pdsr.fast_limit_tokens`"),
    Metric("perf/rollout/suspensions", "number of times that a sample left its worker to continue later",
        "a few percent of the samples", "as for `breaker_trips`"),
    Metric("perf/rollout/stolen_by_fast", "number of admissions of heavy samples on fast workers",
        "any number", "many: raise `rollout.workers.heavy.count`"),
    Metric("perf/rollout/stolen_by_heavy", "number of admissions of fast samples on heavy workers",
        "any number", "many: lower `rollout.workers.heavy.count`"),
    Metric("perf/rollout/repacked_tokens", "number of tokens prefilled again for samples that continued without their "
        "KV cache: on another Ray actor, or after an answer of their environment",
        "0 with local workers and without an environment",
        "see `perf/rollout/rebuilds`, and warnings about lost workers"),
    Metric("perf/rollout/acting_share",
        "share of the samples' time, from their first token on, that they waited for an answer of the environment",
        "any number: slots go to other samples", "high, and generation is slow: raise `env.max_suspended`"),
    Metric("perf/rollout/resumes", "number of samples that continued with their own KV cache after an answer of the "
        "environment; this and `rebuilds` exist only if they are not 0",
        "nearly all answers that do not end a sample", "see `perf/rollout/rebuilds`"),
    Metric("perf/rollout/rebuilds",
        "number of samples whose KV cache was recomputed after an answer of the environment, because others needed "
        "its blocks, its worker was lost, or the observation was long",
        "few of the answers", "raise `rollout.kv_blocks`, or lower `env.max_suspended`"),
    Metric("perf/rollout/staleness_mean, perf/rollout/staleness_max",
        "age, in training steps, of the policy that sampled a token of the step; only with `rollout.max_staleness`",
        "from 0 to `rollout.max_staleness`, which no token exceeds",
        "lower `rollout.max_staleness` if `reward/mean` suffers"),
    Metric("perf/rollout/rounds_ready",
        "number of finished rollout rounds ready when the step asked for its first one, on the host with the fewest; "
        "only with `rollout.max_staleness`",
        "1 or more: training does not wait",
        "0: give more devices to generation (`rollout.devices`); always the highest value: give it fewer"),
    Metric("perf/training_bubble",
        "share of the step in which the training devices waited for samples; only with `rollout.max_staleness`",
        "below 0.1", "as for `perf/rollout/rounds_ready`"),
    Metric("perf/mfu",
        "`perf/flops` / `time/step_s`, as a share of the devices' peak (null if the peak is unknown, as on a CPU)",
        "the higher the better", "raise `algorithm.max_tokens_per_device`"),
    Metric("perf/peak_memory_bytes", "peak memory use so far of the device that uses most; on a CPU, of the process",
        "flat after the first steps", "lower `algorithm.max_tokens_per_device`, or set `model.remat: block`"),
    Metric("perf/compilations",
        "number of programs that XLA compiled in the step, without those loaded from the compilation cache on disk",
        "0 after the first steps", "lengths still reach new buckets"),
    Metric("perf/score_{policy,reference,critic,reward}_tokens_per_s",
        "tokens per second of a role's scoring pass, prompts included and shared ones counted once, over all devices",
        "several times the rate of the update", "raise `score.max_tokens_per_device`"),
    Metric("perf/score_{policy,reference,critic,reward}_compilations",
        "number of programs compiled in a role's scoring pass: one per new shape of rows",
        "0 after the first steps", "as for `perf/compilations`"),
)
