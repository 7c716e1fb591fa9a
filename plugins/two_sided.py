"""Two-sided clip: the ratio is capped where the advantage is negative too (INTELLECT-2, arXiv:2505.07291).

    w    = exp(logp - logp_old)                                        importance ratio of a token
    loss = -min(min(w, delta) A, clip(w, 1 - clip, 1 + clip_high) A)   delta > 1 + clip_high

PPO's clip leaves -w A unbounded where A < 0: a token that has become e^5 times likelier takes e^5 times the step. Here
its loss stops at -delta A and its gradient is 0 beyond. A > 0 is as in GRPO, since clip(w) A is below delta A.
It equals dual_clip with c = delta. A is read token by token: it stacks on every advantage and every token weight.
Aggregation is the run's (plugins.grpo.aggregation). With one update per batch w = 1 and this is GRPO.
"""

from dataclasses import dataclass

from grpozoo import Plugin, hookimpl, importance_ratio, masked_mean, may_be_infinite


class TwoSided(Plugin):
    """`algo=two_sided`."""

    metrics = {
        "ratio_clipped_low": "share of tokens, 0 to 1: ratio below 1 - clip with a negative advantage",
        "ratio_clipped_high": "share of tokens, 0 to 1: ratio above 1 + clip_high with a positive advantage",
        "ratio_capped": "share of tokens, 0 to 1: ratio above delta with a negative advantage",
    }

    @dataclass
    class Config:
        clip: float = 0.2  # lower end of the ratio range is 1 - clip
        clip_high: float = 0.2  # upper end is 1 + clip_high
        delta: float = may_be_infinite(4.0)  # cap of the ratio where A < 0, above 1 + clip_high; inf: none

        def __post_init__(self):
            for name in ("clip", "clip_high"):
                if getattr(self, name) < 0:
                    raise ValueError(f"{name} is at least 0, got {getattr(self, name)}")
            if not self.delta > 1 + self.clip_high:
                raise ValueError(f"delta is above 1 + clip_high = {1 + self.clip_high:g}, got {self.delta}")

    @hookimpl
    def validate(self, config):
        if config.update.per_batch == 1:
            return (
                f"plugins.{self.name} changes nothing with one update per batch: the ratio is 1 and never clipped; "
                "set update.mini_batches or update.epochs above 1"
            )

    @hookimpl
    def policy_loss(self, batch, out):
        low, high, delta = self.config.clip, self.config.clip_high, self.config.delta
        w, A = importance_ratio(out.logprobs, batch.old_logprobs), batch.advantages  # [r, T]
        tokens = int(batch.mask.sum())
        self.log("ratio_clipped_low", masked_mean((w < 1 - low) & (A < 0), batch.mask), tokens)
        self.log("ratio_clipped_high", masked_mean((w > 1 + high) & (A > 0), batch.mask), tokens)
        self.log("ratio_capped", masked_mean((w > delta) & (A < 0), batch.mask), tokens)
        return -(w.clamp(max=delta) * A).minimum(w.clamp(1 - low, 1 + high) * A)
