"""Dual-clip PPO: a floor under the objective where the advantage is negative (arXiv:1912.09729).

    w    = exp(logp - logp_old)                              importance ratio of a token
    l    = max(-w A, -clip(w, 1 - clip, 1 + clip_high) A)    the loss of PPO
    loss = l                                                 A >= 0
         = min(-c A, l)                                      A < 0,  c > 1

A token with A < 0 that has become more than c times likelier has gradient 0 instead of one that grows with w. For
c > 1 + clip_high it equals two_sided with delta = c. A is read token by token: it stacks on every advantage and every
token weight. Aggregation is the run's (plugins.grpo.aggregation); PPO averages over all steps, which is token_mean.
With one update per batch w = 1 and this is GRPO.
"""

from dataclasses import dataclass

from grpozoo import Plugin, clip_surrogate, hookimpl, importance_ratio, masked_mean


class DualClip(Plugin):
    """`algo=dual_clip`."""

    metrics = {
        "ratio_clipped_low": "share of tokens, 0 to 1: ratio below 1 - clip with a negative advantage",
        "ratio_clipped_high": "share of tokens, 0 to 1: ratio above 1 + clip_high with a positive advantage",
        "ratio_capped": "share of tokens, 0 to 1: ratio above c with a negative advantage",
    }

    @dataclass
    class Config:
        clip: float = 0.2  # lower end of the ratio range is 1 - clip
        clip_high: float = 0.2  # upper end is 1 + clip_high
        c: float = 3.0  # cap of the ratio where A < 0, above 1; the DAPO and GSPO scripts set 10

        def __post_init__(self):
            for name in ("clip", "clip_high"):
                if getattr(self, name) < 0:
                    raise ValueError(f"{name} is at least 0, got {getattr(self, name)}")
            if not self.c > 1:
                raise ValueError(f"c is above 1, got {self.c}")

    @hookimpl
    def validate(self, config):
        if config.update.per_batch == 1:
            return (
                f"plugins.{self.name} changes nothing with one update per batch: the ratio is 1 and never clipped; "
                "set update.mini_batches or update.epochs above 1"
            )

    @hookimpl
    def policy_loss(self, batch, out):
        low, high, c = self.config.clip, self.config.clip_high, self.config.c
        w, A = importance_ratio(out.logprobs, batch.old_logprobs), batch.advantages  # [r, T]
        tokens = int(batch.mask.sum())
        self.log("ratio_clipped_low", masked_mean((w < 1 - low) & (A < 0), batch.mask), tokens)
        self.log("ratio_clipped_high", masked_mean((w > 1 + high) & (A > 0), batch.mask), tokens)
        self.log("ratio_capped", masked_mean((w > c) & (A < 0), batch.mask), tokens)
        loss = clip_surrogate(w, A, low, high)
        return loss.where(A >= 0, loss.minimum(-c * A))
