"""KL(policy || reference), as a loss or as a reward of single tokens (Schulman 2020; arXiv:2402.03300; arXiv:2512.02556).

    x  = logp - logp_ref, within +-20
    k1 = x      k2 = x^2 / 2      k3 = exp(-x) + x - 1      k3_plus = value of k3, gradient of k2         nats per token
    form=loss     loss_it += coef k_it            ratio_weighted: coef w_it k_it,  w = exp(logp - logp_old), with gradient
    form=reward   r_it = -coef k1_it              of the old policy, constant

Which gradient that is, in expectation over tokens of the policy:
    KL(policy || ref)   k2, k3_plus, w k1, w k3 as losses; k1 as a reward
    KL(ref || policy)   k3 as a loss           0   k1 as a loss
The loss is a term of its own beside any surrogate, on rows of zero advantage too. The reward enters the total before
the baseline; advantages that look at single tokens (reinforce_pp) place it where it arose.
"""

from dataclasses import dataclass
from enum import Enum

from grpozoo import Plugin, UserError, hookimpl, importance_ratio, kl_estimate, masked_sum

Estimator = Enum("Estimator", ["k1", "k2", "k3", "k3_plus"])
Form = Enum("Form", ["loss", "reward"])


class Kl(Plugin):
    """`algo=[NAME,kl]`."""

    metrics = {"kl": "nats per token: mean of the estimator, without coef and ratio"}

    @dataclass
    class Config:
        coef: float = 0.001  # beta, at least 0; published 0.001 (R1), 0.04 (DeepSeekMath)
        estimator: Estimator = Estimator.k3  # k1 | k2 | k3 | k3_plus
        ratio_weighted: bool = False  # times the importance ratio (DeepSeek-V3.2); k1 and k3 as a loss
        form: Form = Form.loss  # loss | reward

        def __post_init__(self):
            if not self.coef >= 0:
                raise ValueError(f"coef is at least 0, got {self.coef}")
            if self.form is Form.reward and self.estimator is not Estimator.k1:
                raise ValueError(
                    f"as a reward only k1 has the gradient of the KL, {self.estimator.name} pulls elsewhere: set estimator=k1"
                )
            if self.form is Form.reward and self.ratio_weighted:
                raise ValueError(
                    "a reward is given to what the old policy sampled, whose ratio is 1: ratio_weighted=false"
                )
            if self.ratio_weighted and self.estimator not in (Estimator.k1, Estimator.k3):
                raise ValueError(
                    f"ratio_weighted needs an estimator whose mean is the KL (k1 or k3): {self.estimator.name} "
                    "has its gradient without the ratio, and loses it with it"
                )

    def __init__(self, config):
        super().__init__(config)
        second = "all_rows" if config.form is Form.loss else "old_logprobs"
        self.needs = frozenset({"ref_logprobs", second})

    @hookimpl
    def validate(self, config):
        if (config.plugins.get("grpo") or {}).get("kl_coef"):
            raise UserError(
                f"plugins.{self.name} and plugins.grpo.kl_coef={config.plugins['grpo']['kl_coef']} are two KL terms\n"
                f"keep one: plugins.grpo.kl_coef=0, or ~plugins.{self.name}"
            )
        if self.config.form is Form.loss and self.config.estimator is Estimator.k1 and not self.config.ratio_weighted:
            return (
                f"plugins.{self.name}: the gradient of k1 as a loss is 0 in expectation, it only adds noise; "
                "take estimator=k2, ratio_weighted=true or form=reward"
            )
        return None

    @hookimpl
    def token_rewards(self, rollouts):
        if self.config.form is Form.loss:
            return None
        return -self.config.coef * self.estimate(rollouts.old_logprobs, rollouts.ref_logprobs, rollouts.completion_mask)

    @hookimpl
    def regularizer(self, batch, out):
        if self.config.form is Form.reward:
            return None
        kl = self.estimate(out.logprobs, batch.ref_logprobs, batch.mask)  # [r, T]
        if self.config.ratio_weighted:
            kl = importance_ratio(out.logprobs, batch.old_logprobs) * kl
        return self.config.coef * kl

    def estimate(self, logprobs, ref_logprobs, mask):
        """[rows, T] nats, logged."""
        kl = kl_estimate(logprobs, ref_logprobs, self.config.estimator.name)
        tokens = int(mask.sum())
        self.log("kl", masked_sum(kl.detach(), mask) / max(tokens, 1), tokens)
        return kl
