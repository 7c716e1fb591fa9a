"""KL-Cov: the tokens that drive entropy down are held near the old policy (arXiv:2505.22617, sec. 4).

    cov_it  = (A_it - mean_m(A)) (logp_it - mean_m(logp))          of the current policy, no gradient
    K       = the k tokens with the highest cov                    k = max(1, floor(q N)), N tokens in the optimizer step
    loss_it = -w A + beta 1[it in K] |logp - logp_old|             w the ratio, never clipped

Means, N and the choice are over the whole optimizer step; equal covariances go to the lowest index. The penalty is summed by
the policy loss's rule; the published one is a mean over tokens (`plugins.grpo.aggregation=token_mean`). Where the
policy is still the old one the penalty and its gradient are 0: it needs several updates per batch.

It reads the size of A, so it wants the advantage that the loss uses; it stacks on any. It is a policy_loss, and therefore
takes the place of every other surrogate; token weights multiply -w A and not the penalty.
"""

from dataclasses import dataclass

from grpozoo import Plugin, hookimpl, importance_ratio, masked_mean, masked_sum, top_k_mask


class KlCov(Plugin):
    """`algo=kl_cov`."""

    needs = frozenset({"all_rows"})  # a token of advantage 0 may have a high covariance, since A is centred
    controls = frozenset({"entropy"})
    metrics = {
        "threshold": "nats: lowest covariance in K",
        "distance": "nats per token of K: mean |logp - logp_old| (0 on-policy)",
    }

    @dataclass
    class Config:
        share: float = 2e-3  # q, share of tokens that is penalised, 0 to 1; one at least; published 2e-4 for 32B
        coef: float = 1.0  # beta, at least 0; the authors' scripts have 1, the default of verl's port is 0.1

        def __post_init__(self):
            if not 0 <= self.share <= 1:
                raise ValueError(f"share lies in [0, 1], got {self.share}")
            if not self.coef >= 0:
                raise ValueError(f"coef is at least 0, got {self.coef}")

    @hookimpl
    def validate(self, config):
        if config.update.per_batch == 1:
            return (
                f"{self.name} is inert with one update per batch: |logp - logp_old| is 0 there, and what is left is "
                "the ratio without a clip; set update.mini_batches or update.epochs above 1 (the authors: 8 updates)"
            )
        return None

    @hookimpl
    def minibatch(self, batch, out):
        mask = batch.mask
        A, logp = batch.advantages.double(), out.logprobs.double()  # [n, T]
        cov = (A - masked_mean(A, mask)) * (logp - masked_mean(logp, mask))
        k = max(1, int(self.config.share * int(mask.sum())))
        K = top_k_mask(cov, mask, k)
        self.log("threshold", cov[K].min() if K.any() else 0.0)
        return {f"{self.name}/K": K}

    @hookimpl
    def policy_loss(self, batch, out):
        return -importance_ratio(out.logprobs, batch.old_logprobs) * batch.advantages  # [r, T]

    @hookimpl
    def regularizer(self, batch, out):
        K = batch.tables[f"{self.name}/K"]
        distance = (out.logprobs - batch.old_logprobs).abs().masked_fill(~K, 0.0)  # [r, T]
        size = int(K.sum())
        self.log("distance", masked_sum(distance.detach(), K) / max(size, 1), size)
        return self.config.coef * distance
