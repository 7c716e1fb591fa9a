"""One batch of rollouts on its way through its optimizer steps, and how it is cut into them."""

from dataclasses import dataclass, field

from torch import Tensor

from grpozoo.metrics import Sums
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
    metrics: Sums = field(default_factory=dict)


def minibatches(rows: int, count: int, epochs: int, seed: int, step: int) -> list[list[int]]:
    """Row numbers of each optimizer step: every epoch splits a fresh permutation into `count` parts of nearly equal size."""
    if count == 1:
        return [list(range(rows))] * epochs
    plan = []
    for epoch in range(epochs):
        order = stream(seed, "minibatches", step, epoch).permutation(rows).tolist()
        plan += [order[part * rows // count : (part + 1) * rows // count] for part in range(count)]
    return plan
