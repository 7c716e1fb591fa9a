"""OPSM: off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, sec. 3.1).

    d_i  = 1/L_i sum_t (logp_sampler_t - logp_t)      nats per token: how far the policy has left its completion
    w_it = 0 if A_it < 0 and d_i > threshold, else 1

Pushing away from a completion that the policy would hardly produce any more teaches little and does harm; towards a
good one it may always go. d_i holds both drifts, between sampler and trainer and from update to update. The weights are
constants that multiply the policy loss, so they stack on any advantage and any loss. Completions that nobody sampled
keep weight 1.
"""

from dataclasses import dataclass

import torch

from grpozoo import Plugin, hookimpl, masked_mean


class Opsm(Plugin):
    """`algo=[NAME,opsm]`."""

    metrics = {"dropped": "share of completions, 0 to 1: negative advantage, and left by the policy"}

    @dataclass
    class Config:
        threshold: float = 0.5  # delta, nats per token, at least 0

        def __post_init__(self):
            if self.threshold < 0:
                raise ValueError(f"threshold is at least 0 nats, got {self.threshold}")

    @hookimpl
    def token_weights(self, batch, out):
        d = masked_mean(batch.sampler_logprobs - out.logprobs.detach(), batch.mask, dim=1)[:, None]  # [r, 1]
        own = [name == "policy" for name in batch.rollouts.policy]
        sampled = torch.tensor(own, dtype=torch.bool, device=batch.mask.device)[:, None]  # [r, 1]
        dropped = sampled & (d > self.config.threshold) & (batch.advantages < 0)  # [r, T]
        rows = int(batch.mask.any(1).sum())
        self.log("dropped", (dropped & batch.mask).any(1).sum() / max(rows, 1), rows)
        return torch.ones_like(batch.advantages).masked_fill(dropped, 0)
