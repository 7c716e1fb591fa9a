"""GDPO: each reward component is normalised on its own before they are added up (arXiv:2601.05242).

    z_ki = (r_ki - mean(r_k,group)) / (std(r_k,group) + eps)           per component k; ddof 1
    S_i  = sum_k w_k z_ki                                              w_k: the weight of the reward plugin
    A_i  = S_i / (std(S_batch) + eps)                                  ddof 1

Summed first, components of different scale hide each other, and different mixtures of them give the same total.
The S of a group add up to 0, so the batch's mean needs no subtraction. An answer that is missing leaves its component's
group and adds 0; a row without any answer leaves the batch too. A component that is equal in a group adds exactly 0.

It reads components, so what others add to the total would be lost: rewards of single tokens and totals reshaped by
transform_rewards are refused. It stacks on any loss, weight and aggregation.
"""

from dataclasses import dataclass

import torch

from grpozoo import Plugin, UserError, group_equal, group_mean, group_std, hookimpl

ROUNDING = 1e-9  # relative difference at which the total is still the sum of the components


class Gdpo(Plugin):
    """`algo=gdpo reward=[answer,format]`."""

    conflicts = {"long2short": "it shapes the total, and gdpo reads the components that the total was made of"}

    @dataclass
    class Config:
        eps: float = 1e-4  # added to each std, at least 0

        def __post_init__(self):
            if self.eps < 0:
                raise ValueError(f"eps is at least 0, got {self.eps}")

    @hookimpl
    def validate(self, config):
        if (config.plugins.get("kl") or {}).get("form") == "reward":
            raise UserError(
                f"plugins.kl.form=reward does not stack with {self.name}, which normalises each reward component of a "
                "completion\nset plugins.kl.form=loss, or use another advantage"
            )

    @hookimpl
    def advantage(self, rollouts, rewards):
        self.check(rewards)
        S, group_id = torch.zeros_like(rewards.total), rollouts.group_id  # [R] float64
        for name, r in rewards.components.items():
            z = (r - group_mean(r, group_id)) / (group_std(r, group_id) + self.config.eps)
            S = S + rewards.weights[name] * z.nan_to_num(0.0).masked_fill(group_equal(r, group_id), 0.0)
        answered = ~rewards.total.isnan()
        rows = int(answered.sum())
        std = (S[answered].square().sum() / max(rows - 1, 1)).sqrt()
        return (S / (std + self.config.eps)).nan_to_num(0.0).masked_fill(~answered, 0.0)  # nan: 0 / 0 if eps is 0

    def check(self, rewards):
        """The total holds nothing but the components."""
        if rewards.tokens is not None:
            raise UserError(
                f"{self.name} normalises each reward component of a completion: token rewards do not go with that\n"
                "put the KL penalty into the loss, or use another advantage"
            )
        total = torch.zeros_like(rewards.total)
        for name, r in rewards.components.items():
            total = total + rewards.weights[name] * r.nan_to_num(0.0)
        gap = (total - rewards.total).abs().nan_to_num(0.0)
        if bool((gap > ROUNDING * total.abs().clamp(min=1)).any()):
            raise UserError(
                f"{self.name} reads reward components, and the total is not their weighted sum: a plugin that shapes the "
                "total in transform_rewards() would be ignored\ndrop that plugin, or use another advantage"
            )
