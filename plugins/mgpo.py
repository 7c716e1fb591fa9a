"""MGPO: groups of middling accuracy weigh most (VibeThinker-1.5B, arXiv:2511.06221).

    p    = share of right completions in the group
    D(p) = p ln(p / 0.5) + (1 - p) ln((1 - p) / 0.5)       nats, distance from the accuracy of largest entropy; 0 to ln 2
    w(p) = exp(-gamma D(p))                                1 at p = 1/2, 2^-gamma at 0 and 1
    A_i <- w(p) A_i

p is what evaluation calls right, not the shaped reward. Completions without a verdict do not count; a group without any
keeps its advantages. It wraps whichever advantage is active, so it stacks on all of them; it applies late (order 10) and
commutes with other factors, but not with one that normalises the batch afterwards.
"""

from dataclasses import dataclass

import torch

from grpozoo import Plugin, group_mean, hookimpl


class Mgpo(Plugin):
    """`algo=mgpo`, or `algo=[dr_grpo,mgpo]`."""

    order = 10
    metrics = {"weight": "factor, 0 to 1: mean over completions of w(p); 1 for groups that are right half of the time"}

    @dataclass
    class Config:
        gamma: float = 1.0  # strength, at least 0; 0: off; the paper gives no value

        def __post_init__(self):
            if self.gamma < 0:
                raise ValueError(f"gamma is at least 0, got {self.gamma}")

    @hookimpl(wrapper=True)
    def advantage(self, rollouts, rewards, run):
        A = yield  # [R] or [R, T]
        p = group_mean(run.verdicts(rollouts, rewards), rollouts.group_id)  # [R], NaN without a verdict
        D = torch.xlogy(p, 2 * p) + torch.xlogy(1 - p, 2 * (1 - p))
        w = (-self.config.gamma * D).exp().nan_to_num(1.0)
        self.log("weight", w.mean(), len(w))
        return A * (w if A.ndim == 1 else w[:, None])
