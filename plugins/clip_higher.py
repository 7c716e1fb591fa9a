"""Clip-higher: a ratio range that is wider above 1 than below (DAPO, arXiv:2503.14476, sec. 3.1).

    w    = exp(logp - logp_old)                              importance ratio of a token
    loss = -min(w A, clip(w, 1 - clip, 1 + clip_high) A)     clip_high > clip

A symmetric range binds in proportion to the probability: at clip 0.2 a token of 1 % may rise to 1.2 %, one of 50 % to
60 %. The wider upper end lets rare tokens of good completions grow further, which keeps the entropy up.
A is read token by token: it stacks on every advantage and every token weight. Aggregation is the run's
(plugins.grpo.aggregation); DAPO's is token_mean. With one update per batch w = 1 and this is GRPO.
"""

from dataclasses import dataclass

from grpozoo import Plugin, clip_surrogate, hookimpl, importance_ratio, masked_mean


class ClipHigher(Plugin):
    """`algo=clip_higher`."""

    metrics = {
        "ratio_clipped_low": "share of tokens, 0 to 1: ratio below 1 - clip with a negative advantage",
        "ratio_clipped_high": "share of tokens, 0 to 1: ratio above 1 + clip_high with a positive advantage",
    }

    @dataclass
    class Config:
        clip: float = 0.2  # eps_low, lower end of the ratio range is 1 - clip
        clip_high: float = 0.28  # eps_high, upper end is 1 + clip_high; 0.2 to 0.35 is usual

        def __post_init__(self):
            for name in ("clip", "clip_high"):
                if getattr(self, name) < 0:
                    raise ValueError(f"{name} is at least 0, got {getattr(self, name)}")

    @hookimpl
    def validate(self, config):
        if config.update.per_batch == 1:
            return (
                f"plugins.{self.name} changes nothing with one update per batch: the ratio is 1 and never clipped; "
                "set update.mini_batches or update.epochs above 1"
            )

    @hookimpl
    def policy_loss(self, batch, out):
        low, high = self.config.clip, self.config.clip_high
        w, A = importance_ratio(out.logprobs, batch.old_logprobs), batch.advantages  # [r, T]
        tokens = int(batch.mask.sum())
        self.log("ratio_clipped_low", masked_mean((w < 1 - low) & (A < 0), batch.mask), tokens)
        self.log("ratio_clipped_high", masked_mean((w > 1 + high) & (A > 0), batch.mask), tokens)
        return clip_surrogate(w, A, low, high)
