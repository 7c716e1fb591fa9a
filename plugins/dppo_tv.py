"""DPPO-TV: a trust region in probabilities instead of ratios (arXiv:2602.04879).

    p     = exp(logp), p_old = exp(logp_old), w = p / p_old            no gradient
    trust = 1[p - p_old <= eps_high]                                   A > 0
          = 1[p - p_old >= -eps_low]                                   A < 0
    loss  = -min(w, c) A logp trust                                    gradient -min(w, c) A trust

|p - p_old| of the sampled token bounds the total variation from below. A ratio of 2 means little at p_old = 0.001 and
everything at 0.5: rare tokens stay free here, where a ratio clip silences them first, and likely ones are held.
eps_low = eps_high = 0.2 is a choice of this project; c = 20 is the published cap of the weight.
A is read token by token: it stacks on every advantage and every token weight. Aggregation is the run's
(plugins.grpo.aggregation). The loss is no objective: only its gradient has a meaning.
"""

from dataclasses import dataclass

from grpozoo import Plugin, hookimpl, importance_ratio, masked_mean


class DppoTv(Plugin):
    """`algo=dppo_tv`."""

    metrics = {
        "dropped": "share of tokens, 0 to 1: outside the trust region, without gradient",
        "ratio_capped": "share of tokens, 0 to 1: importance ratio above c",
    }

    @dataclass
    class Config:
        eps_low: float = 0.2  # A < 0: a token whose probability fell by more is dropped; 0 to 1, our choice
        eps_high: float = 0.2  # A > 0: one whose probability rose by more is dropped; 0 to 1, our choice
        c: float = 20.0  # cap of the importance ratio, at least 1

        def __post_init__(self):
            for name in ("eps_low", "eps_high"):
                if not 0 <= getattr(self, name) <= 1:
                    raise ValueError(f"{name} is a difference of probabilities, 0 to 1, got {getattr(self, name)}")
            if self.c < 1:
                raise ValueError(f"c is at least 1, got {self.c}")

    @hookimpl
    def validate(self, config):
        if config.update.per_batch == 1:
            return (
                f"plugins.{self.name} changes nothing with one update per batch: every weight is 1; "
                "set update.mini_batches or update.epochs above 1"
            )

    @hookimpl
    def policy_loss(self, batch, out):
        logprobs, A = out.logprobs.detach(), batch.advantages  # [r, T]
        w, moved = importance_ratio(logprobs, batch.old_logprobs), logprobs.exp() - batch.old_logprobs.exp()
        trust = (moved <= self.config.eps_high).where(A > 0, moved >= -self.config.eps_low) | (A == 0)
        tokens = int(batch.mask.sum())
        self.log("dropped", masked_mean(~trust, batch.mask), tokens)
        self.log("ratio_capped", masked_mean(w > self.config.c, batch.mask), tokens)
        weight = w.clamp(max=self.config.c).masked_fill(~(trust & batch.mask), 0)  # masked ratios may be NaN
        return -weight * A * out.logprobs
