"""Max@k: the advantage of the expected best of k completions (arXiv:2510.23393), a baseline of VPO.

    r_(1) <= ... <= r_(n)     the group in ascending order
    a_(i)                     = [C(i-1, k-1) r_(i) + sum_{j>i} C(j-2, k-2) r_(j)] / C(n, k)
    A_i                       = (a_i - mean a) / (std a + eps)         ddof 1

a_(i) is the mean over all subsets of k that hold i of their maximum, times k/n: the share of best@k that completion i
has a part in. Ties have equal a. A row without a reward leaves its group, and k is at most n - 1 of those that stay;
equal rewards give exactly 0. The subsets stand for k independent completions, so a token sampler that couples those of
a group is refused. It reads totals alone and stacks on any loss, weight and reward.
"""

from dataclasses import dataclass
from math import comb

import torch

from grpozoo import Plugin, UserError, group_equal, group_mean, group_std, hookimpl


class MaxAtK(Plugin):
    """`algo=max_at_k`."""

    @dataclass
    class Config:
        k: int | None = None  # completions of which the best counts, 1 to group_size - 1; null: max(2, n // 2)
        eps: float = 1e-6  # added to the std of a, at least 0

        def __post_init__(self):
            if self.k is not None and self.k < 1:
                raise ValueError(f"k is at least 1, got {self.k}")
            if self.eps < 0:
                raise ValueError(f"eps is at least 0, got {self.eps}")

    @hookimpl
    def validate(self, config):
        n = config.group_size
        if (k := self.config.k or max(2, n // 2)) >= n:
            raise UserError(
                f"plugins.{self.name}: k = {k} leaves no choice among group_size={n} completions\nset group_size={k + 1} or more"
            )
        return None if k > 1 else f"{self.name}: with k=1 the best of k is the mean, and this is GRPO"

    @hookimpl(trylast=True)  # a sampler may be built in another plugin's setup
    def setup(self, run):
        if not run.hooks.token_sampler(run=run).independent:
            raise UserError(
                f"{self.name} does not stack with this run's token sampler: it couples the completions of a group, and the "
                "best of a subset is then not the best of k independent ones\nuse sampler=iid"
            )

    @hookimpl
    def advantage(self, rollouts, rewards):
        total, group_id = rewards.total, rollouts.group_id  # [R] float64
        a = torch.full_like(total, torch.nan)
        for group in group_id.unique().tolist():
            rows = ((group_id == group) & ~total.isnan()).nonzero()[:, 0]
            a[rows] = self.shares(total[rows])
        A = (a - group_mean(a, group_id)) / (group_std(a, group_id) + self.config.eps)
        return A.nan_to_num(0.0).masked_fill(group_equal(total, group_id), 0.0)  # [R]

    def shares(self, r):
        """a [n] of the rewards [n] of one group."""
        n = len(r)
        k = min(self.config.k or max(2, n // 2), max(n - 1, 1))
        order = r.argsort(stable=True)
        own = r.new_tensor([comb(i - 1, k - 1) / comb(n, k) for i in range(1, n + 1)])
        other = r.new_tensor([comb(j - 2, k - 2) / comb(n, k) if j > 1 and k > 1 else 0.0 for j in range(1, n + 1)])
        later = (other * r[order]).flip(0).cumsum(0).flip(0) - other * r[order]  # sum over j > i
        return torch.empty_like(r).index_put((order,), own * r[order] + later)
