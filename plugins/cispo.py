"""CISPO: clip the importance weight, keep the gradient of every token (MiniMax-M1, arXiv:2506.13585, sec. 3.1).

    w    = exp(logp - logp_old)                                      importance ratio of a token, no gradient
    v    = clip(w, 1 - clip_low, 1 + clip_high)                      clip_low null: no lower end
    M    = 0 where A > 0 and w > 1 + mask_high                       eq. 7, if token_mask; 1 elsewhere
         = 0 where A < 0 and w < 1 - mask_low
    loss = -M v A logp                                               gradient -M v A

PPO's clip silences a token once it has moved too far; here it keeps a bounded weight. With the mask of eq. 7 the
trust region of PPO returns. clip_high is the distance from 1: the cap is 1 + clip_high. The paper does not disclose it;
4.0 (cap 5) is ScaleRL's value as TRL documents it, where epsilon_high = 5 names the cap itself.
A is read token by token: it stacks on every advantage and every token weight. Aggregation is the run's
(plugins.grpo.aggregation); the paper's is token_mean. The loss is no objective: only its gradient has a meaning.
"""

from dataclasses import dataclass

from grpozoo import Plugin, hookimpl, importance_ratio, masked_mean


class Cispo(Plugin):
    """`algo=cispo`."""

    metrics = {
        "weight_clipped": "share of tokens, 0 to 1: importance ratio outside [1 - clip_low, 1 + clip_high]",
        "dropped": "share of tokens, 0 to 1: without gradient by the token mask",
    }

    @dataclass
    class Config:
        clip_low: float | None = None  # eps_low, lower end of the weight is 1 - clip_low; null: none, as published
        clip_high: float = 4.0  # eps_high, the weight's cap is 1 + clip_high; not published
        token_mask: bool = False  # drop tokens outside PPO's trust region (eq. 7)
        mask_low: float = 0.2  # token_mask only: A < 0 is dropped below 1 - mask_low
        mask_high: float = 0.2  # token_mask only: A > 0 is dropped above 1 + mask_high

        def __post_init__(self):
            for name in ("clip_low", "clip_high", "mask_low", "mask_high"):
                if (getattr(self, name) or 0) < 0:
                    raise ValueError(f"{name} is at least 0, got {getattr(self, name)}")

    @hookimpl
    def validate(self, config):
        if config.update.per_batch == 1:
            return (
                f"plugins.{self.name} changes nothing with one update per batch: every weight is 1; "
                "set update.mini_batches or update.epochs above 1"
            )

    @hookimpl
    def policy_loss(self, batch, out):
        low, high = self.config.clip_low, self.config.clip_high
        w, A = importance_ratio(out.logprobs.detach(), batch.old_logprobs), batch.advantages  # [r, T]
        v = w.clamp(None if low is None else 1 - low, 1 + high)
        drop = batch.mask & (self.outside(w, A) if self.config.token_mask else False)
        tokens = int(batch.mask.sum())
        self.log("weight_clipped", masked_mean(v != w, batch.mask), tokens)
        self.log("dropped", masked_mean(drop, batch.mask), tokens)
        v = v.masked_fill(drop | ~batch.mask, 0)  # masked ratios may be NaN
        return -v * A * out.logprobs

    def outside(self, w, A):
        """[r, T] bool, the tokens that eq. 7 drops."""
        rising = (A > 0) & (w > 1 + self.config.mask_high)
        return rising | ((A < 0) & (w < 1 - self.config.mask_low))
