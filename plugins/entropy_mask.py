"""High-entropy tokens only, the 80/20 rule: train where the policy hesitates (arXiv:2506.01939, sec. 5).

    k    = max(1, floor(rho N + 0.9999))                     N tokens in the optimizer step
    S    = the k positions with the highest entropy H        of the current policy, no gradient
    w_it = N / |S| on S, 0 elsewhere                         normalizer selected
         = 1 on S, 0 elsewhere                               normalizer all
    loss = aggregate(w_it loss_it)

S is chosen over the whole optimizer step by the entropy of the position, not by the probability of the token that was drawn;
equal entropies go to the lowest index. Under token_mean the first normalizer divides by |S|, as the authors' code
does, and the second by N. Other aggregations keep the same factor: the step's mean weight is 1, but a single row's
need not be. The authors' clip is DAPO's (`plugins.grpo.clip_high=0.28`), their aggregation token_mean.

A weight is a factor of the policy loss: it stacks on any advantage and any per-token surrogate. With share 1 it is
the base method, bit for bit.
"""

from dataclasses import dataclass
from enum import Enum

from grpozoo import Plugin, hookimpl, top_k_mask

Normalizer = Enum("Normalizer", ["selected", "all"])


class EntropyMask(Plugin):
    """`algo=entropy_mask`."""

    needs = frozenset({"entropy"})
    conflicts = {
        "stare": "the mask would remove tokens that STARE picks by surprisal and counts in its quantile, so neither rule holds"
    }
    metrics = {
        "selected": "share of tokens, 0 to 1: |S| / N, those that train",
        "threshold": "nats: lowest entropy in S",
    }

    @dataclass
    class Config:
        share: float = 0.2  # rho, share of tokens that trains, 0 to 1; one token at least
        normalizer: Normalizer = Normalizer.selected  # tokens that a mean divides by: those in S, or all

        def __post_init__(self):
            if not 0 <= self.share <= 1:
                raise ValueError(f"share lies in [0, 1], got {self.share}")

    @hookimpl
    def minibatch(self, batch, out):
        N = int(batch.mask.sum())
        k = max(1, int(N * self.config.share + 0.9999))
        S = top_k_mask(out.entropy, batch.mask, k)  # [n, T]
        size = max(int(S.sum()), 1)
        self.log("selected", int(S.sum()) / max(N, 1), N)
        self.log("threshold", out.entropy[S].min() if S.any() else 0.0)
        factor = N / size if self.config.normalizer is Normalizer.selected else 1.0
        return {f"{self.name}/weights": factor * S.to(out.entropy.dtype)}

    @hookimpl
    def token_weights(self, batch):
        return batch.tables[f"{self.name}/weights"]
