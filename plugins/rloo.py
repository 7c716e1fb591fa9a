"""RLOO: REINFORCE with a leave-one-out baseline (Back to Basics, arXiv:2402.14740).

    A_i = r_i - 1/(n - 1) sum_{j != i} r_j = (r_i - mean(r_group)) n / (n - 1)       n siblings with a reward
    A_i <- A_i / (std(A_batch) + eps)                                               with batch_norm; ddof 1

The advantages of a group add up to 0, so the mean of the batch needs no subtraction. A row without a reward leaves its
group; a row without siblings and a group of equal rewards have advantage exactly 0.

The mean of the others is an unbiased baseline only if they are independent of row i. A token sampler that couples the
completions of a group biases it, by +27 % in a small exact example, so such a sampler is refused. It reads rewards
alone and stacks on any loss, weight and aggregation.
"""

from dataclasses import dataclass

import torch

from grpozoo import Plugin, UserError, group_equal, group_index, group_mean, hookimpl


class Rloo(Plugin):
    """`algo=rloo`."""

    metrics = {"batch_std": "reward: std of the advantages of the batch, by which batch_norm divides"}

    @dataclass
    class Config:
        batch_norm: bool = False  # divide by the std of the whole batch's advantages
        eps: float = 1e-4  # added to that std, in units of the reward, at least 0

        def __post_init__(self):
            if self.eps < 0:
                raise ValueError(f"eps is at least 0, got {self.eps}")

    @hookimpl(trylast=True)  # a sampler may be built in another plugin's setup
    def setup(self, run):
        if not run.hooks.token_sampler(run=run).independent:
            raise UserError(
                f"{self.name} does not stack with this run's token sampler: it couples the completions of a group, and the "
                "mean of the others is then a biased baseline\nuse algo=dr_grpo (the group's mean), or sampler=iid"
            )

    @hookimpl
    def advantage(self, rollouts, rewards):
        total, group_id = rewards.total, rollouts.group_id  # [R] float64
        answered = ~total.isnan()
        index, groups = group_index(group_id)
        n = torch.bincount(index[answered], minlength=groups)[index].double()
        A = (total - group_mean(total, group_id)) * n / (n - 1)  # [R]
        A = A.nan_to_num(0.0).masked_fill(group_equal(total, group_id), 0.0)
        rows = int(answered.sum())
        if self.config.batch_norm and rows > 1:
            std = (A.square().sum() / (rows - 1)).sqrt()
            self.log("batch_std", std)
            A = (A / (std + self.config.eps)).nan_to_num(0.0)  # 0 / 0 if eps is 0 and all groups are equal
        return A
