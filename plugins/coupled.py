"""Baselines for completions that were sampled together (QuasiMoTTo, arXiv:2607.01179).

    center        A_i = r_i - mean(r_group)                            E[g_hat] = g - Cov(mean s, mean r)
    cross_block   A_i = r_i - mean(r_j : j in the group's other blocks) E[g_hat] = g

g is the policy gradient, s_i = grad log pi(y_i); both baselines without division. Independent completions make the
covariance g / k, coupled ones mostly less, so `center` comes closer to g here than with sampler=iid, where it is g (1 -
1/k). A baseline from blocks that were drawn independently (plugins.qmc.blocks) is exactly unbiased and costs some of
the coverage. A row without a reward leaves its group; a row with no other block that answered has advantage 0.
It reads rewards alone and stacks on any loss, weight and aggregation.
"""

from dataclasses import dataclass
from enum import Enum

from grpozoo import Plugin, UserError, group_equal, group_mean, hookimpl

Baseline = Enum("Baseline", ["center", "cross_block"])


class Coupled(Plugin):
    """`algo=coupled`."""

    @dataclass
    class Config:
        baseline: Baseline = Baseline.center  # center | cross_block, which needs plugins.qmc.blocks of 2 or more

    @hookimpl
    def validate(self, active):
        most = max(getattr(plugin.config, "blocks", 1) for plugin in active.plugins.values())
        if self.config.baseline is Baseline.cross_block and most < 2:
            raise self.refusal()

    @hookimpl
    def advantage(self, rollouts, rewards):
        r, group_id = rewards.total, rollouts.group_id  # [R] float64
        if self.config.baseline is Baseline.center:
            A = r - group_mean(r, group_id)
        else:
            A = r - self.others(r, group_id, rollouts.design)
        return A.nan_to_num(0.0).masked_fill(group_equal(r, group_id), 0.0)

    def others(self, r, group_id, design):
        """[R] float64: the mean reward of the group's other blocks; NaN if none of them answered."""
        if "block" not in design:
            raise self.refusal()
        other = (group_id[:, None] == group_id) & (design["block"][:, None] != design["block"]) & ~r.isnan()  # [R, R]
        return other.double() @ r.nan_to_num(0.0) / other.sum(1)

    def refusal(self):
        return UserError(
            f"plugins.{self.name}.baseline=cross_block needs groups of several independent blocks\n"
            "set sampler=qmc plugins.qmc.blocks=2, or use baseline=center"
        )
