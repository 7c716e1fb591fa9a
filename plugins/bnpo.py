"""BNPO: rewards normalised by a Beta law that is fitted to the batch (arXiv:2506.02864).

    r'_i  = (r_i - reward_min) / (reward_max - reward_min)             in [0, 1]
    p_q   = mean(r'_group);  m, v = mean and variance (ddof 1) of p_q over the prompts of the batch
    a     = (m (1 - m) / v - 1) m,  b = (m (1 - m) / v - 1) (1 - m)    Beta(a, b) has mean m and variance v
    alpha = max(1, 1 + a / 3),  beta = max(1, 1 + b / 3)
    A_i   = min(1 / BetaPDF(p_q; alpha, beta), 1e6) (r'_i - p_q)

Accuracies that are rare in the batch weigh more. With one prompt, or all p_q equal (to 1e-6), there is no spread to
fit: alpha = beta = 1 and A = r' - p_q. Rewards outside the range are refused. A row without a reward leaves its group;
equal rewards give exactly 0. Not to be confused with the aggregation of this name in other libraries. It reads rewards
alone and stacks on any loss, weight and aggregation.
"""

from dataclasses import dataclass
from math import lgamma

import torch

from grpozoo import Plugin, UserError, group_equal, group_index, group_mean, hookimpl

CAP = 1e6  # of the weight
SPREAD = 1e-6  # of p_q, below which nothing is fitted
ROUNDING = 1e-9  # by which r' may leave [0, 1]


class Bnpo(Plugin):
    """`algo=bnpo`."""

    metrics = {
        "alpha": "number >= 1: first parameter of the Beta law fitted to the prompts' mean rewards",
        "beta": "number >= 1: its second parameter",
    }

    @dataclass
    class Config:
        reward_min: float = 0.0  # total reward that is mapped to 0
        reward_max: float = 1.0  # total reward that is mapped to 1, above reward_min

        def __post_init__(self):
            if not self.reward_max > self.reward_min:
                raise ValueError(f"reward_max is above reward_min = {self.reward_min}, got {self.reward_max}")

    @hookimpl
    def advantage(self, rollouts, rewards):
        total, group_id = rewards.total, rollouts.group_id  # [R] float64
        low, high = self.config.reward_min, self.config.reward_max
        r = (total - low) / (high - low)
        if bool(((r < -ROUNDING) | (r > 1 + ROUNDING)).any()):
            answered = total[~total.isnan()]
            raise UserError(
                f"{self.name} needs total rewards from {low:g} to {high:g}, got {answered.min():g} to {answered.max():g}\n"
                f"set plugins.{self.name}.reward_min and plugins.{self.name}.reward_max to the ends of your rewards' range"
            )
        p = group_mean(r, group_id)  # [R], p_q of the row's prompt
        index, groups = group_index(group_id)
        p_q = p.new_zeros(groups).scatter(0, index, p)  # [P]
        alpha, beta = self.fit(p_q[~p_q.isnan()])
        log_norm = lgamma(alpha) + lgamma(beta) - lgamma(alpha + beta)
        log_pdf = torch.xlogy(alpha - 1, p) + torch.special.xlog1py(beta - 1, -p) - log_norm
        A = (-log_pdf).exp().clamp(max=CAP) * (r - p)
        self.log("alpha", alpha)
        self.log("beta", beta)
        return A.nan_to_num(0.0).masked_fill(group_equal(total, group_id), 0.0)

    def fit(self, p_q):
        """alpha and beta from the mean rewards [P] of the prompts."""
        if len(p_q) < 2 or float(p_q.max() - p_q.min()) <= SPREAD:
            return 1.0, 1.0
        m, v = float(p_q.mean()), float(p_q.var())
        size = m * (1 - m) / v - 1  # a + b
        return max(1.0, 1 + size * m / 3), max(1.0, 1 + size * (1 - m) / 3)
