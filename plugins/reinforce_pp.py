"""REINFORCE++: return-to-go, whitened over all tokens of the batch (arXiv:2501.03262).

    r_it = token reward of token t              r_iT += total_i - sum_t r_it     the rest of the total, at the last token
    R_it = r_it + gamma R_i,t+1                                                  return-to-go
    A_it = (R_it - mean_m(R)) / sqrt(var_m(R) + 1e-8)        mean and var (ddof 1) over every valid token of the batch

There is no group: it works with one completion per prompt, and a group of equal rewards keeps an advantage. Token
rewards are what other plugins answer, such as kl with form=reward. A row without a reward leaves the statistics.
Tokens that the policy did not sample (mask 0) are skipped, in the discount too.
"""

from dataclasses import dataclass

import torch

from grpozoo import Plugin, hookimpl, whiten


class ReinforcePp(Plugin):
    """`algo=reinforce_pp`, or `algo=[reinforce_pp,kl] plugins.kl.form=reward plugins.kl.estimator=k1`."""

    @dataclass
    class Config:
        gamma: float = 1.0  # discount per token, 0 to 1

        def __post_init__(self):
            if not 0 <= self.gamma <= 1:
                raise ValueError(f"gamma lies in [0, 1], got {self.gamma}")

    @hookimpl
    def advantage(self, rollouts, rewards):
        mask = rollouts.completion_mask & ~rewards.total.isnan()[:, None]  # [R, T]
        return whiten(self.returns(rewards, mask), mask)

    def returns(self, rewards, mask):
        """Return-to-go [R, T] float64; 0 where masked."""
        tokens = rewards.total.new_zeros(mask.shape) if rewards.tokens is None else rewards.tokens
        tokens = tokens.masked_fill(~mask, 0.0)
        terminal = rewards.total - tokens.sum(1)  # [R]
        last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)  # [R, T], one token in each row that has any
        tokens = torch.where(last, tokens + terminal[:, None], tokens)
        returns, ahead = torch.zeros_like(tokens), tokens.new_zeros(len(tokens))
        for t in range(mask.shape[1] - 1, -1, -1):
            returns[:, t] = tokens[:, t] + self.config.gamma * ahead
            ahead = torch.where(mask[:, t], returns[:, t], ahead)
        return returns.masked_fill(~mask, 0.0)
