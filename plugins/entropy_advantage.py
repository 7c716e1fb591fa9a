"""Entropy-shaped advantage (arXiv:2506.14758): more credit, and less blame, where the policy is uncertain.

    A'_it = A_it + min(alpha H_it, |A_it| / kappa)          H: entropy of the old policy at the token, nats, constant

kappa > 1 keeps the sign of A, and A = 0 stays 0: it stacks on any advantage. It works against the fall of entropy, so
it does not stack with another plugin that controls the entropy.
"""

from dataclasses import dataclass

from grpozoo import Plugin, hookimpl, masked_mean


class EntropyAdvantage(Plugin):
    """`algo=entropy_advantage`, or on another advantage `algo=[NAME,entropy_advantage]`."""

    needs = frozenset({"entropy"})
    controls = frozenset({"entropy"})
    order = 20  # on the finished advantage
    metrics = {"bonus": "advantage per token: mean of the added term"}

    @dataclass
    class Config:
        alpha: float = 0.4  # per nat, at least 0
        kappa: float = 2.0  # the term is at most |A| / kappa, above 1

        def __post_init__(self):
            if not self.alpha >= 0:
                raise ValueError(f"alpha is at least 0, got {self.alpha}")
            if not self.kappa > 1:
                raise ValueError(f"kappa is above 1 (the sign of A must stay), got {self.kappa}")

    @hookimpl(wrapper=True)
    def advantage(self, rollouts, rewards):
        A = yield  # [R] or [R, T]
        mask = rollouts.completion_mask & ~rewards.total.isnan()[:, None]
        A = A if A.ndim == 2 else A[:, None].expand(mask.shape)
        entropy = rollouts.entropy.masked_fill(~mask, 0.0)
        bonus = (self.config.alpha * entropy).minimum(A.abs() / self.config.kappa)  # [R, T]
        self.log("bonus", masked_mean(bonus, mask), int(mask.sum()))
        return A + bonus
