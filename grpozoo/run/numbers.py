"""The numbers of a run: how long its parts took, and what a step's completions looked like."""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from grpozoo.cycle import Cycle
from grpozoo.evaluate import group_shares
from grpozoo.metrics import Sums, add, dead_groups, means
from grpozoo.ops import group_equal
from grpozoo.run.tracking import peak_memory_mb
from grpozoo.types import Rewards, Rollouts


class Clock:
    """Seconds of the parts of a step, by metric name."""

    def __init__(self):
        self.timings: dict[str, float] = {}
        self.began = time.perf_counter()

    def start(self) -> None:
        """A step begins."""
        self.began = time.perf_counter()

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Add the block's seconds to the step's metric `name`."""
        start = time.perf_counter()
        yield
        self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What happens meanwhile is not part of the step."""
        kept = dict(self.timings)
        try:
            yield
        finally:
            self.timings = kept

    def step(self, cycle: Cycle) -> dict[str, float]:
        """Everything the core knows about the step that has just ended; the next one starts from nothing."""
        metrics = means(cycle.metrics) | self.timings
        metrics["time/step_s"] = time.perf_counter() - self.began
        seconds = self.timings.get("time/generate_s", 0.0)  # 0: the cycle came out of a checkpoint
        metrics["rollout/tokens_per_second"] = metrics["rollout/tokens"] / seconds if seconds else float("nan")
        metrics["memory/peak_mb"] = peak_memory_mb() or float("nan")
        self.timings = {}
        return metrics


def observe(rollouts: Rollouts, rewards: Rewards, verdicts: Sequence[float], policies: Collection[str]) -> Sums:
    """Sums of the step's completions. policies: those of the run; given completions have no entropy of ours."""
    sums: Sums = {}
    lengths, total = rollouts.lengths.double(), rewards.total
    add(sums, "rollout/rows", len(rollouts))
    add(sums, "rollout/length_mean", float(lengths.mean()))
    add(sums, "rollout/length_max", float(lengths.max()))
    add(sums, "rollout/tokens", float(lengths.sum()))
    add(sums, "rollout/truncated", sum(reason == "length" for reason in rollouts.finish_reason) / len(rollouts))
    own = torch.tensor([name in policies for name in rollouts.policy])
    add(sums, "rollout/entropy", -float(rollouts.logprobs[own].sum()) / max(float(lengths[own].sum()), 1))
    for name, values in {**rewards.components, "total": total}.items():
        answered = values[~values.isnan()]
        add(sums, f"reward/{name}_mean", float(answered.mean()), len(answered))
        if name != "total":
            add(sums, f"reward/{name}_missing", 1 - len(answered) / len(values))
    add(sums, "reward/missing", float(total.isnan().double().mean()))
    add(sums, "reward/total_std", float(total[~total.isnan()].std(correction=0)), float((~total.isnan()).sum()))
    for name, value in group_shares(verdicts, rollouts.group_id).items():
        add(sums, name, value)
    add(sums, "groups/equal", float(group_equal(total, rollouts.group_id).double().mean()))
    return sums


def foreseen(metrics: dict[str, float], group_size: int) -> str | None:
    """How many groups will teach nothing, judged by the first evaluation; None: few."""
    accuracy = next((value for name, value in metrics.items() if name.startswith("heldout/avg@")), float("nan"))
    dead = dead_groups(accuracy, group_size)
    if not dead > 0.5:
        return None
    return (
        f"at a sampled accuracy of {accuracy:.1%}, of independent samples, at least {dead:.0%} of the groups of "
        f"{group_size} will be all right or all wrong and teach nothing: a larger group_size or an easier (harder) task helps"
    )
