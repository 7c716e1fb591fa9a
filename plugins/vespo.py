"""VESPO: variational sequence-level soft policy optimisation (arXiv:2602.10693).

    W     = prod_t pi_t / pi_old_t                    the whole ratio, no 1/L; log W clamped to [-18.42, 20]
    phi   = sg[W^k exp(lambda (1 - W))]               (k, lambda) by the sign of A; phi(1) = 1, phi -> 0 for large W
    loss  = -phi_i A_it logp_t                        per token
    total = sum_it loss / tokens                      aggregation token_mean

In place of a clip a soft weight: all tokens of a completion keep a gradient, the less the further it has drifted from
the policy that sampled it. phi multiplies the score, so any advantage and any weights of tokens stack with it.
"""

from dataclasses import dataclass

import torch

from grpozoo import Plugin, hookimpl, masked_mean, masked_sum


class Vespo(Plugin):
    """`algo=vespo`."""

    metrics = {"phi": "1, at least 0: mean weight of a token (1 on-policy)"}

    @dataclass
    class Config:
        k_pos: float = 2.0  # k for A >= 0, power of W, at least 0
        lambda_pos: float = 3.0  # lambda for A >= 0, decay in W, at least 0
        k_neg: float = 3.0  # k for A < 0
        lambda_neg: float = 2.0  # lambda for A < 0

        def __post_init__(self):
            for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"):
                if getattr(self, name) < 0:
                    raise ValueError(f"{name} is at least 0, got {getattr(self, name)}")

    @hookimpl
    def validate(self, config):
        if config.update.per_batch == 1:
            return f"{self.name}: with one update per batch every phi is 1, so this is REINFORCE with token_mean"
        return None

    @hookimpl
    def policy_loss(self, batch, out):
        o, A, mask = self.config, batch.advantages, batch.mask
        logp = out.logprobs.masked_fill(~mask, 0)  # [r, T]
        log_W = masked_sum(logp.detach() - batch.old_logprobs, mask, dim=1).clamp(-18.42, 20)[:, None]  # [r, 1]
        positive = o.k_pos * log_W + o.lambda_pos * (1 - log_W.exp())
        negative = o.k_neg * log_W + o.lambda_neg * (1 - log_W.exp())
        phi = torch.where(A >= 0, positive, negative).exp()  # [r, T]
        self.log("phi", masked_mean(phi, mask), int(mask.sum()))
        return -phi * A * logp

    @hookimpl
    def aggregation(self):
        return "token_mean"
