"""GSPO-token: GSPO's ratio with advantages of single tokens (arXiv:2507.18071, sec. 4.3).

    s_i   = exp(1/L_i sum_t (logp_t - logp_old_t))                             eq. 7
    s_it  = sg[s_i] pi_t / sg[pi_t]                                            eq. 14: value s_i, gradient s_i grad logp_t
    loss  = -min(s_it A_it, clip(s_it, 1 - clip, 1 + clip_high) A_it)          eq. 13, per token
    total = 1/B sum_i 1/L_i sum_t loss_it                                      aggregation seq_mean

The completion shares the value of its ratio, the sign of each token's advantage decides which end of the range binds.
With A_it = A_i it is GSPO. log s is clamped at 10. Being a loss per token it stacks on any advantage (a critic's, one
that differs from turn to turn) and under any weights of tokens.
"""

from dataclasses import dataclass

from grpozoo import Plugin, clip_surrogate, hookimpl, masked_mean


class GspoToken(Plugin):
    """`algo=gspo_token`."""

    metrics = {"clipped_tokens": "share of tokens, 0 to 1: the ratio is out of range and the token has no gradient"}

    @dataclass
    class Config:
        clip: float = 0.05  # lower end of the range of s is 1 - clip; published 3e-4 for thousands of tokens
        clip_high: float | None = None  # upper end is 1 + clip_high; null: clip; published 4e-4

        def __post_init__(self):
            for name in ("clip", "clip_high"):
                if (getattr(self, name) or 0) < 0:
                    raise ValueError(f"{name} is at least 0, got {getattr(self, name)}")

    @hookimpl
    def validate(self, config):
        if config.update.per_batch == 1:
            return f"{self.name}: with one update per batch every ratio is 1, so this is GRPO with seq_mean"
        return None

    @hookimpl
    def policy_loss(self, batch, out):
        low, high = self.config.clip, self.config.clip if self.config.clip_high is None else self.config.clip_high
        A, mask = batch.advantages, batch.mask
        logp = out.logprobs.masked_fill(~mask, 0)  # [r, T]
        log_s = masked_mean(logp.detach() - batch.old_logprobs, mask, dim=1)[:, None]  # [r, 1]
        s = (log_s + (logp - logp.detach())).clamp(max=10).exp()  # [r, T]
        clipped = (((s < 1 - low) & (A < 0)) | ((s > 1 + high) & (A > 0))) & mask
        tokens = int(mask.sum())
        self.log("clipped_tokens", clipped.sum() / max(tokens, 1), tokens)
        return clip_surrogate(s, A, low, high)

    @hookimpl
    def aggregation(self):
        return "seq_mean"
