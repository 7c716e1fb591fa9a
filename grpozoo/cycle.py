"""One batch of rollouts on its way through its optimizer steps, and how it is cut into them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from grpozoo.hooks import Plugin
from grpozoo.rng import stream
from grpozoo.types import Rewards, Rollouts


@dataclass
class Cycle:
    """One batch of rollouts and how far its optimizer steps have come."""

    rollouts: Rollouts
    rewards: Rewards
    advantages: Tensor  # [R, T] float32, 0 where masked
    minibatches: list[list[int]]  # rows of each optimizer step
    done: int = 0
    tables: dict[str, Tensor] = field(default_factory=dict)  # name -> [R, T] of the optimizer step at hand
    metrics: dict[str, list[float]] = field(default_factory=dict)  # name -> [sum of value * weight, sum of weights]

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add to the weighted mean `name`."""
        total = self.metrics.setdefault(name, [0.0, 0.0])
        total[0] += value * weight
        total[1] += weight

    def absorb(self, plugins: Mapping[str, Plugin]) -> None:
        """Take over what plugins logged of the whole step, which every process knows."""
        for plugin in plugins.values():
            for name, value, weight in plugin.logged:
                self.add(name, value, weight)
            plugin.logged.clear()

    def means(self) -> dict[str, float]:
        """The weighted means so far."""
        return {name: total / weight if weight else math.nan for name, (total, weight) in self.metrics.items()}


def minibatches(rows: int, count: int, epochs: int, seed: int, step: int) -> list[list[int]]:
    """Row numbers of each optimizer step: every epoch splits a fresh permutation into `count` parts of nearly equal size."""
    if count == 1:
        return [list(range(rows))] * epochs
    plan = []
    for epoch in range(epochs):
        order = stream(seed, "minibatches", step, epoch).permutation(rows).tolist()
        plan += [order[part * rows // count : (part + 1) * rows // count] for part in range(count)]
    return plan
