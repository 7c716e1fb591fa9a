"""STEER: every token is damped by the change of entropy that it would cause (arXiv:2510.10150).

    p    = pi(o_it), p_old likewise                       both clamped to [1e-8, 1 - 1e-8]
    f    = p (1 - p) (log p + H)                          H entropy of the position, nats
    O    = |A / p_old f|                                  estimated size of the change of entropy
    k    = -log(w_min) / max(max O, floor)
    w_it = exp(-k O), clamped to [w_min, 1]               multiplies the token's loss

All of it is without gradient and from the current policy; the maximum is over the whole optimizer step. The token that
would move entropy most weighs w_min, up or down; there is no target. The exponent of 1 - p is that of the authors'
code. Their surrogate is DAPO's (`plugins.grpo.clip_high=0.28`), their aggregation token_mean.

A weight is a factor of the policy loss: it stacks on any advantage and any per-token surrogate. With w_min 1 it is
the base method, bit for bit.
"""

import math
from dataclasses import dataclass

from grpozoo import Plugin, hookimpl, masked_mean

TINY = 1e-8  # probabilities stay this far from 0 and 1


class Steer(Plugin):
    """`algo=steer`."""

    needs = frozenset({"entropy"})
    controls = frozenset({"entropy"})
    metrics = {
        "weight": "1: mean weight of a token",
        "max_change": "nats: max O, the largest estimated change of entropy by a token",
    }

    @dataclass
    class Config:
        w_min: float = 0.8  # weight of the token with the largest change, in (0, 1]
        floor: float = 0.02  # a largest change below this counts as this, nats, above 0

        def __post_init__(self):
            if not 0 < self.w_min <= 1:
                raise ValueError(f"w_min lies in (0, 1], got {self.w_min}")
            if not self.floor > 0:
                raise ValueError(f"floor is above 0, got {self.floor}")

    @hookimpl
    def minibatch(self, batch, out):
        p, p_old = (x.double().exp().clamp(TINY, 1 - TINY) for x in (out.logprobs, batch.old_logprobs))  # [n, T]
        f = p * (1 - p) * (p.log() + out.entropy)
        change = (batch.advantages / p_old * f).abs().masked_fill(~batch.mask, 0.0)
        largest = float(change.max())
        k = -math.log(self.config.w_min) / max(largest, self.config.floor)
        weights = (-k * change).exp().clamp(self.config.w_min, 1.0)
        self.log("weight", masked_mean(weights, batch.mask), int(batch.mask.sum()))
        self.log("max_change", largest)
        return {f"{self.name}/weights": weights.to(out.logprobs.dtype)}

    @hookimpl
    def token_weights(self, batch):
        return batch.tables[f"{self.name}/weights"]
