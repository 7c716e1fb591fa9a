"""pass@k as the objective: only what the best completion adds counts (arXiv:2503.19595).

    A_i = (r_max - r_2nd) / (s + eps)      i the best of its group, s = std(r_group), ddof 1
        = 0                                for all others, and where several share the best reward

The group is the k of pass@k. Without the division A_i = max_j r_j - max_{j != i} r_j, the leave-one-out form of the
paper; as for every leave-one-out baseline the others must be independent of row i, so a token sampler that couples the
completions of a group is refused. A row without a reward leaves its group; without a sibling it has advantage 0.
Nothing is ever pushed down, so most rows have advantage 0. It reads rewards alone and stacks on any loss and weight.
"""

from dataclasses import dataclass

import torch

from grpozoo import Plugin, UserError, group_equal, group_std, hookimpl


class Passk(Plugin):
    """`algo=passk`."""

    metrics = {"lone_best": "share of groups, 0 to 1: one completion alone is best; the others teach nothing"}

    @dataclass
    class Config:
        std: bool = True  # divide by the std of the group; false: the plain difference
        eps: float = 1e-6  # added to that std, in units of the reward, at least 0

        def __post_init__(self):
            if self.eps < 0:
                raise ValueError(f"eps is at least 0, got {self.eps}")

    @hookimpl(trylast=True)  # a sampler may be built in another plugin's setup
    def setup(self, run):
        if not run.hooks.token_sampler(run=run).independent:
            raise UserError(
                f"{self.name} does not stack with this run's token sampler: it couples the completions of a group, and the "
                "best of the others is then a biased baseline\nuse sampler=iid"
            )

    @hookimpl
    def advantage(self, rollouts, rewards):
        total, group_id = rewards.total, rollouts.group_id  # [R] float64
        A = torch.zeros_like(total)
        groups = group_id.unique().tolist()
        for group in groups:
            rows = ((group_id == group) & ~total.isnan()).nonzero()[:, 0]
            if len(rows) > 1:
                (best, second), place = total[rows].topk(2)
                A[rows[place[0]]] = best - second
        A = A.masked_fill(group_equal(total, group_id), 0.0)
        self.log("lone_best", int((A > 0).sum()) / max(len(groups), 1), len(groups))
        if self.config.std:
            A = (A / (group_std(total, group_id) + self.config.eps)).nan_to_num(0.0).masked_fill(A == 0, 0.0)
        return A
