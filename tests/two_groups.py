"""The worked batch of the entropy methods: two groups of four, 34 tokens, T = 5, at ratios away from 1."""

import torch

from grpozoo.testing import Fixture, assemble
from grpozoo.testing.example import whole_batch

GRPO = ("plugins.grpo.eps=1e-6", "plugins.grpo.aggregation=token_mean")  # what the worked numbers stand on
DAPO = (*GRPO, "plugins.grpo.clip_high=0.28")
TOKENS = 34


def two_groups() -> Fixture:
    """Rewards 1 0 0 1 | 1 1 1 0. Advantages +-0.866024 and 0.499999 (-1.499997 for the last): reward over std + 1e-6.

    logprobs: as written. old: the same but for six tokens (log ratio +0.4 and so on). entropy: as written, nats.
    """
    lengths = [5, 4, 5, 3, 5, 4, 5, 3]
    current = table([
        [-0.10, -0.02, -1.50, -0.30, -0.05], [-0.70, -0.01, -0.20, -2.20], [-0.05, -0.90, -0.03, -0.40, -0.60],
        [-2.50, -0.15, -0.08], [-0.20, -0.35, -0.04, -0.01, -0.12], [-0.60, -3.00, -0.25, -0.02],
        [-0.03, -0.07, -0.45, -1.10, -0.09], [-0.80, -0.06, -1.80],
    ])  # fmt: skip
    entropy = table([
        [0.40, 0.10, 1.20, 0.60, 0.20], [0.90, 0.05, 0.50, 1.40], [0.20, 0.80, 0.10, 0.70, 0.75],
        [1.30, 0.35, 0.25], [0.45, 0.55, 0.15, 0.05, 0.30], [0.85, 1.60, 0.50, 0.10],
        [0.10, 0.20, 0.65, 1.00, 0.30], [0.95, 0.20, 1.25],
    ])  # fmt: skip
    old = current.clone()
    for (row, token), moved in LOG_RATIOS.items():
        old[row, token] -= moved
    tables = {"logprobs": old, "old_logprobs": old, "ref_logprobs": old, "entropy": entropy}
    step = assemble(lengths, [0] * 4 + [1] * 4, [1, 0, 0, 1, 1, 1, 1, 0], tables, current)
    A = torch.tensor(ADVANTAGES, dtype=torch.float64)
    return step._replace(batch=whole_batch(step.rollouts, step.rewards, A))


# std sqrt(1/3) and 1/2: 0.5 / 0.577351, 0.25 / 0.500001, 0.75 / 0.500001
ADVANTAGES = [0.866024, -0.866024, -0.866024, 0.866024, 0.499999, 0.499999, 0.499999, -1.499997]
LOG_RATIOS = {(0, 2): 0.40, (1, 3): -0.40, (3, 0): 0.10, (5, 1): -0.05, (7, 2): 0.35, (2, 1): -0.30}


def table(rows) -> torch.Tensor:
    """Ragged rows -> [8, 5] float64, 0 beyond their end."""
    return torch.tensor([row + [0.0] * (5 - len(row)) for row in rows], dtype=torch.float64)


def places(mask) -> set[tuple[int, int]]:
    """Where a [n, T] mask is true, as (row, token)."""
    return {(row, token) for row, token in mask.nonzero().tolist()}
