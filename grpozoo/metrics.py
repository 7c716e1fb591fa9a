"""What each metric means, how its parts are averaged, and which course of the metrics means trouble.

Names are `area/what`; NAME stands for a reward component, or for the plugin that measures a pool of answers, K for a
number of samples or answers. Every share lies in [0, 1].
A plugin's metrics are called PLUGIN/what and described in `Plugin.metrics`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite, nan
from typing import Any

METRICS: dict[str, str] = {  # name or pattern -> "unit: meaning (expected range)"
    "reward/total_mean": "reward: mean weighted total of the completions that have one (rises while the policy learns)",
    "reward/total_std": "reward: standard deviation of the total over all completions of the step",
    "reward/missing": "share: completions without any reward; they leave their group (0)",
    "reward/NAME_mean": "reward: mean of component NAME, unweighted, over completions that it answered",
    "reward/NAME_missing": "share: completions for which component NAME gave no answer or failed (0)",
    "groups/all_right": "share: groups whose completions are all right; no gradient (rises at the end of training)",
    "groups/all_wrong": "share: groups whose completions are all wrong; no gradient (falls)",
    "groups/mixed": "share: groups with right and wrong completions (the ones that teach)",
    "groups/equal": "share: groups whose total rewards are all equal, so that every advantage is 0 (below 1)",
    "rollout/length_mean": "tokens: mean completion length, stop token included",
    "rollout/length_max": "tokens: longest completion of the step (at most max_completion_length)",
    "rollout/truncated": "share: completions cut at max_completion_length before a stop token (near 0)",
    "rollout/entropy": "nats per token: mean surprisal of the sampled tokens, which estimates entropy (falls slowly)",
    "rollout/tokens": "tokens: generated in the step, all processes",
    "rollout/tokens_per_second": "tokens per second: generation speed, all processes",
    "rollout/rows": "completions: rows that reached the update step, after resampling",
    "update/loss": "loss: mean over the step's updates (0 at the first update is normal: its gradient is not 0)",
    "update/grad_norm": "gradient: 2-norm before clipping, mean over the step's updates (finite, above 0)",
    "update/lr": "learning rate: of the step's last update",
    "update/skipped_rows": "share: completions left out because their advantage is 0; the result is the same",
    "update/skipped_steps": "share: optimizer steps left out because no row had a token to train on (0)",
    "update/max_logprob_gap": "nats: largest |log-probability of a token at the first update - the one recorded while "
    "sampling| (below 1e-3 in float32)",
    "time/step_s": "seconds: the whole step",
    "time/generate_s": "seconds: generation",
    "time/reward_s": "seconds: reward functions",
    "time/measure_s": "seconds: log-probabilities and entropies before the update, where something needs them",
    "time/update_s": "seconds: forward, backward and optimizer",
    "time/eval_s": "seconds: held-out evaluation",
    "time/checkpoint_s": "seconds: writing a checkpoint",
    "memory/peak_mb": "MB (1e6 bytes): peak of the process so far, or of the accelerator where there is one",
    "heldout/accuracy": "share: held-out prompts whose greedy completion is right",
    "heldout/avg@K": "share: right among K sampled completions per held-out prompt, the accuracy of one sample",
    "heldout/pass@K": "share: expected chance that at least one of K samples is right (unbiased)",
    "heldout/best@K": "reward: expected largest total reward of K samples (unbiased)",
    "heldout/distinct": "completions: different right ones among the eval.samples of a prompt, mean over prompts (diversity)",
    "heldout/maj@K": "share: expected accuracy of a majority vote among K samples (exact; ties share the credit)",
    "heldout/length_mean": "tokens: mean length of the greedy completions",
    "heldout/truncated": "share: greedy completions cut at max_completion_length (near 0)",
    "heldout/missing": "share: held-out completions without a verdict; they are left out of every estimate (0)",
    "NAME/best@K": "reward: expected largest scalar reward of K of the answers to a held-out prompt, whatever completions "
    "they stand in (unbiased)",
    "NAME/coverage@K": "reward: the same for weights of the components that nobody knows, mean over uniform ones",
    "NAME/diversity": "reward: L1 distance of the components of two answers to a held-out prompt, mean over pairs",
    "step": "count: batches of rollouts trained on so far",
    "seconds": "seconds: since the start of the run, interruptions left out",
}
Sums = dict[str, list[float]]  # name -> [sum of value * weight, sum of weights]
Logged = tuple[str, float, float]  # name, value, weight
WINDOW = 10  # steps in a row before a warning


def describe(name: str, plugins: Mapping[str, Any] | None = None) -> str | None:
    """'unit: meaning' of a metric; `plugins`: name -> Plugin class or instance. None: nobody describes it."""
    if name in METRICS:
        return METRICS[name]
    owner, _, rest = name.partition("/")
    if plugins and owner in plugins and rest in plugins[owner].metrics:
        return plugins[owner].metrics[rest]
    return next((text for pattern, text in METRICS.items() if _expression(pattern).fullmatch(name)), None)


def add(sums: Sums, name: str, value: float, weight: float = 1.0) -> None:
    """Add to the weighted mean `name`. What has no weight has no influence, whatever its value."""
    total = sums.setdefault(name, [0.0, 0.0])
    if weight:
        total[0] += value * weight
        total[1] += weight


def means(sums: Sums) -> dict[str, float]:
    """sum(weight value) / sum(weight); NaN without weight.

    3 of 4 and 3 of 12 tokens are 6 of 16 = 0.375, not the mean of the two shares.
    """
    return {name: total / weight if weight else nan for name, (total, weight) in sums.items()}


def taken(plugins: Mapping[str, Any]) -> list[Logged]:
    """What plugins have logged since they were last asked, in the order of application."""
    parts = [part for plugin in plugins.values() for part in plugin.logged]
    for plugin in plugins.values():
        plugin.logged = []
    return parts


def absorb(sums: Sums, plugins: Mapping[str, Any]) -> Sums:
    """Add what plugins have logged of the whole step, which every process knows."""
    for part in taken(plugins):
        add(sums, *part)
    return sums


@contextmanager
def aside(plugins: Mapping[str, Any]) -> Iterator[None]:
    """What plugins log meanwhile does not mix with what they logged of training."""
    kept = {plugin: plugin.logged for plugin in plugins.values()}
    try:
        for plugin in kept:
            plugin.logged = []
        yield
    finally:
        for plugin, logged in kept.items():
            plugin.logged = logged


def dead_groups(accuracy: float, group_size: int) -> float:
    """Expected share of groups that are all right or all wrong if each sample is right with this chance.

    A lower bound when the chance differs between prompts (x^G + (1 - x)^G is convex).
    """
    return accuracy**group_size + (1 - accuracy) ** group_size


def diagnose(history: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Kind of trouble -> one line with a remedy, judged by the last WINDOW lines of training metrics."""
    steps = [line for line in history if "reward/total_mean" in line][-WINDOW:]
    found: dict[str, str] = {}
    if steps and any(_broken(steps[-1].get(name, 0.0)) for name in ("update/loss", "update/grad_norm")):
        found["diverged"] = "the loss or the gradient is not finite: lower lr, or set optim.max_grad_norm"
    for name in sorted({name for line in steps for name in line if re.fullmatch("reward/(.+_)?missing", name)}):
        values = _numbers(steps, name)
        if len(values) >= 3 and sum(values) / len(values) > 0.1:
            who = name.removeprefix("reward/").removesuffix("missing").removesuffix("_")
            source = f"reward {who!r}" if who else "the rewards together"
            share = sum(values) / len(values)
            found[name] = f"{source} gave no answer for {share:.0%} of the completions: look at its errors"
    if len(steps) == WINDOW:
        found |= _dead(steps)
    return found


def _dead(steps: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    found = {}
    if _all(steps, "groups/equal", lambda value: value >= 1):
        if _all(steps, "groups/all_right", lambda value: value >= 1):
            remedy = "every completion is right: take a harder task, or stop"
        elif _all(steps, "groups/all_wrong", lambda value: value >= 1):
            remedy = (
                "every completion is wrong: take an easier task, a larger group_size or a better start, "
                "and check the rewards in completions.jsonl"
            )
        else:
            remedy = "take prompts of another difficulty, a larger group_size or a graded reward"
        found["equal"] = f"no group had two different rewards in {WINDOW} steps, so nothing is learnt: {remedy}"
    if _all(steps, "rollout/entropy", lambda value: value < 0.01):
        found["entropy"] = (
            f"entropy was below 0.01 nats per token for {WINDOW} steps, siblings are copies: "
            "lower lr, raise temperature, or stop"
        )
    if _all(steps, "rollout/truncated", lambda value: value >= 0.9):
        found["truncated"] = (
            f"nearly all completions were cut for {WINDOW} steps: raise max_completion_length, or check the stop token"
        )
    if _all(steps, "update/max_logprob_gap", lambda value: value > 0.5):
        found["gap"] = (
            f"sampler and update disagreed by over 0.5 nats for {WINDOW} steps: "
            "use model.dtype=float32, or another engine"
        )
    return found


def _all(steps: Sequence[Mapping[str, Any]], name: str, test: Any) -> bool:
    values = _numbers(steps, name)
    return len(values) == len(steps) and all(map(test, values))


def _numbers(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [line[name] for line in steps if not _broken(line.get(name))]


def _broken(value: Any) -> bool:
    return value is None or not isfinite(value)


def _expression(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern).replace("NAME", r"[^/]+")
    return re.compile(re.sub(r"@K$", r"@\\d+", text))
