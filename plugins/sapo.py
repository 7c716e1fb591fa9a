"""SAPO: a smooth gate in place of the clip (arXiv:2511.20347).

    w    = exp(logp - logp_old)                              importance ratio of a token
    tau  = tau_pos where A > 0, tau_neg elsewhere
    loss = -(4 / tau) sigmoid(tau (w - 1)) A
    gate = 4 s (1 - s) = sech^2(tau (w - 1) / 2)             s = sigmoid(tau (w - 1)); gradient -gate w A

The gate is 1 at w = 1 and falls on both sides, the faster the larger tau; a larger tau for negative advantages damps
the tokens whose gradient spreads over the whole vocabulary. The loss at w = 1 is -2 A / tau, not -A: only its gradient
compares with GRPO's. A is read token by token: it stacks on every advantage and every token weight.
Aggregation is the run's (plugins.grpo.aggregation); the paper's is seq_mean.
"""

from dataclasses import dataclass

import torch

from grpozoo import Plugin, hookimpl, importance_ratio, masked_mean


class Sapo(Plugin):
    """`algo=sapo`."""

    metrics = {"gate": "mean over tokens, 0 to 1: factor of the unclipped gradient (1 on-policy)"}

    @dataclass
    class Config:
        tau_pos: float = 1.0  # temperature where A > 0, positive; larger: the gate closes closer to w = 1
        tau_neg: float = 1.05  # temperature where A < 0, positive

        def __post_init__(self):
            for name in ("tau_pos", "tau_neg"):
                if not getattr(self, name) > 0:
                    raise ValueError(f"{name} is above 0, got {getattr(self, name)}")

    @hookimpl
    def validate(self, config):
        if config.update.per_batch == 1:
            return (
                f"plugins.{self.name} changes nothing with one update per batch: every gate is 1; "
                "set update.mini_batches or update.epochs above 1"
            )

    @hookimpl
    def policy_loss(self, batch, out):
        w, A = importance_ratio(out.logprobs, batch.old_logprobs), batch.advantages  # [r, T]
        tau = torch.full_like(A, self.config.tau_neg).masked_fill(A > 0, self.config.tau_pos)
        s = torch.sigmoid(tau * (w - 1))
        gate = 4 * s.detach() * (1 - s.detach())
        self.log("gate", masked_mean(gate, batch.mask), int(batch.mask.sum()))
        return -(4 / tau) * s * A
