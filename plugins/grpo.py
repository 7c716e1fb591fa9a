"""GRPO: group relative policy optimisation (DeepSeekMath, arXiv:2402.03300, sec. 4), the foundation of every run.

    A_i   = (r_i - mean(r_group)) / (std(r_group) + eps)             the same for all tokens of completion i
    w     = exp(logp - logp_old)                                     importance ratio of a token
    loss  = -min(w A, clip(w, 1 - clip, 1 + clip_high) A)            per token
    k3    = exp(logp_ref - logp) - (logp_ref - logp) - 1             added with weight kl_coef, >= 0
    total = 1/B sum_i 1/L_i sum_t (loss + kl_coef k3)                aggregation seq_mean

Conventions where the paper is silent: the standard deviation is the unbiased one (ddof 1), eps = 1e-4. A row without
a reward leaves its group. A group whose rewards are all equal has advantage exactly 0, and so has a single row.
The log ratio is clamped to +-20 before it is exponentiated. Every hook here is answered last: any plugin that
replaces one does so by answering it.
"""

from dataclasses import dataclass
from enum import Enum

from grpozoo import Plugin, group_equal, group_mean, group_std, hookimpl, masked_sum

Std = Enum("Std", ["group", "batch", "none"])
Aggregation = Enum("Aggregation", ["seq_mean", "token_mean", "const_len", "seq_sum", "token_sum"])


class Grpo(Plugin):
    """`base=grpo`; its options are those of every method that builds on it."""

    metrics = {
        "ratio_clipped_low": "share of tokens, 0 to 1: ratio below 1 - clip with a negative advantage (0 on-policy)",
        "ratio_clipped_high": "share of tokens, 0 to 1: ratio above 1 + clip_high with a positive advantage (0 on-policy)",
        "kl": "nats per token: mean k3 estimate of KL(policy || reference)",
    }

    options_for = {
        "advantage": ("std", "ddof", "eps"),
        "policy_loss": ("clip", "clip_high"),
        "aggregation": ("aggregation",),
    }

    @dataclass
    class Config:
        std: Std = Std.group  # what the centred reward is divided by; none: nothing (Dr. GRPO's advantage)
        ddof: int = 1  # 1: unbiased std; 0: population std
        eps: float = 1e-4  # added to the std
        clip: float = 0.2  # lower end of the ratio range is 1 - clip
        clip_high: float | None = None  # upper end is 1 + clip_high; null: clip
        kl_coef: float = 0.0  # beta, weight of k3 in the loss
        aggregation: Aggregation = Aggregation.seq_mean

        def __post_init__(self):
            if self.ddof not in (0, 1):
                raise ValueError(f"ddof is 0 or 1, got {self.ddof}")
            for name in ("eps", "clip", "clip_high", "kl_coef"):
                if (getattr(self, name) or 0) < 0:
                    raise ValueError(f"{name} is at least 0, got {getattr(self, name)}")

    def __init__(self, config):
        super().__init__(config)
        self.needs = frozenset({"ref_logprobs", "all_rows"}) if config.kl_coef else frozenset()

    @hookimpl(trylast=True)
    def advantage(self, rollouts, rewards):
        total, group_id = rewards.total, rollouts.group_id  # [R] float64
        centred = total - group_mean(total, group_id)
        if self.config.std is Std.group:
            centred = centred / (group_std(total, group_id, self.config.ddof) + self.config.eps)
        elif self.config.std is Std.batch:
            centred = centred / (group_std(total, group_id * 0, self.config.ddof) + self.config.eps)
        return centred.nan_to_num(0.0).masked_fill(group_equal(total, group_id), 0.0)  # [R]

    @hookimpl(trylast=True)
    def policy_loss(self, batch, out):
        low, high = self.config.clip, self.config.clip if self.config.clip_high is None else self.config.clip_high
        ratio = (out.logprobs - batch.old_logprobs).clamp(-20, 20).exp()  # [r, T]
        A = batch.advantages
        tokens = int(batch.mask.sum())
        self.log("ratio_clipped_low", masked_sum((ratio < 1 - low) & (A < 0), batch.mask) / max(tokens, 1), tokens)
        self.log("ratio_clipped_high", masked_sum((ratio > 1 + high) & (A > 0), batch.mask) / max(tokens, 1), tokens)
        return -(ratio * A).minimum(ratio.clamp(1 - low, 1 + high) * A)

    @hookimpl(trylast=True)
    def aggregation(self):
        return self.config.aggregation.name

    @hookimpl
    def regularizer(self, batch, out):
        if not self.config.kl_coef:
            return None
        x = (batch.ref_logprobs - out.logprobs).clamp(-20, 20)  # [r, T]
        k3 = x.expm1() - x
        tokens = int(batch.mask.sum())
        self.log("kl", masked_sum(k3.detach(), batch.mask) / max(tokens, 1), tokens)
        return self.config.kl_coef * k3
