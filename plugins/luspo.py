"""LUSPO: length-unbiased sequence policy optimisation (arXiv:2602.05261).

    s_i   = exp(1/L_i sum_t (logp_t - logp_old_t))                        GSPO's ratio
    s_it  = sg[s_i] pi_t / sg[pi_t]                                       the same value, gradient s_i grad logp_t
    loss  = -L_i min(s_it A_i, clip(s_it, 1 - clip, 1 + clip_high) A_i)   per token
    total = 1/B sum_i 1/L_i sum_t loss_it                                 aggregation seq_mean

GSPO's gradient of a token carries 1/L_i, which favours short right answers and long wrong ones; the factor L_i takes it
away. The ratio is written per token, which changes nothing for one advantage per row, so that advantages and weights of
single tokens (the loss is linear in both up to the clip) act on their tokens. log s is clamped at 10.
"""

from dataclasses import dataclass

from grpozoo import Plugin, clip_surrogate, hookimpl, masked_mean


class Luspo(Plugin):
    """`algo=luspo`."""

    metrics = {"clipped_tokens": "share of tokens, 0 to 1: the ratio is out of range and the token has no gradient"}

    @dataclass
    class Config:
        clip: float = 0.05  # lower end of the range of s is 1 - clip; published 2e-3 for thousands of tokens
        clip_high: float | None = None  # upper end is 1 + clip_high; null: clip; published 2.5e-3

        def __post_init__(self):
            for name in ("clip", "clip_high"):
                if (getattr(self, name) or 0) < 0:
                    raise ValueError(f"{name} is at least 0, got {getattr(self, name)}")

    @hookimpl
    def validate(self, config):
        if config.update.per_batch == 1:
            return f"{self.name}: with one update per batch every ratio is 1, so this is GRPO with seq_sum"
        return None

    @hookimpl
    def policy_loss(self, batch, out):
        low, high = self.config.clip, self.config.clip if self.config.clip_high is None else self.config.clip_high
        A, mask = batch.advantages, batch.mask
        logp = out.logprobs.masked_fill(~mask, 0)  # [r, T]
        log_s = masked_mean(logp.detach() - batch.old_logprobs, mask, dim=1)[:, None]  # [r, 1]
        s = (log_s + (logp - logp.detach())).clamp(max=10).exp()  # [r, T]
        clipped = (((s < 1 - low) & (A < 0)) | ((s > 1 + high) & (A > 0))) & mask
        L, tokens = mask.sum(1, keepdim=True), int(mask.sum())  # [r, 1]
        self.log("clipped_tokens", clipped.sum() / max(tokens, 1), tokens)
        return L * clip_surrogate(s, A, low, high)

    @hookimpl
    def aggregation(self):
        return "seq_mean"
