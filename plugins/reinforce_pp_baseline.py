"""REINFORCE++ with a group baseline (arXiv:2501.03262): the group gives the mean, the batch gives the scale.

    c_i  = r_i - mean(r_group)                                                the same for all tokens of completion i
    A_it = (c_i - mean_m(c)) / sqrt(var_m(c) + 1e-8)         mean and var (ddof 1) over every valid token of the batch

A row without a reward leaves its group and the statistics. c is exactly 0 in a group of equal rewards; the token mean
is taken off all rows alike, so such a group (a single row, too) has A = -mean_m(c) / std, which is 0 where completions
are equally long. The common recipe adds a KL loss: `plugins.kl.estimator=k2 plugins.kl.coef=0.01`.
"""

from grpozoo import Plugin, group_equal, group_mean, hookimpl, whiten


class ReinforcePpBaseline(Plugin):
    """`algo=reinforce_pp_baseline`, or `algo=[reinforce_pp_baseline,kl]`."""

    @hookimpl
    def advantage(self, rollouts, rewards):
        total, group_id = rewards.total, rollouts.group_id  # [R] float64
        centred = (total - group_mean(total, group_id)).masked_fill(group_equal(total, group_id), 0.0)
        mask = rollouts.completion_mask & ~total.isnan()[:, None]  # [R, T]
        return whiten(centred[:, None].expand(mask.shape), mask)
