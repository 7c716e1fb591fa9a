"""Entropy bonus: the classic reward for staying undecided (A3C, arXiv:1602.01783, sec. 4), added to GRPO's loss.

    H_it = -sum_v pi(v) log pi(v)                    of the position's whole distribution, nats, with gradient
    loss = L - beta mean_m(H)                        mean over all tokens of the optimizer step

The mean is over tokens, whatever rule sums the policy loss, so beta keeps its meaning under every aggregation. It adds
a term and reads nothing of the others: it stacks on any advantage and any surrogate. Every token takes part, those of
rows without advantage too. It has no target: a beta too large drives entropy up without end.
"""

from dataclasses import dataclass

from grpozoo import Plugin, hookimpl, masked_mean


class EntropyBonus(Plugin):
    """`algo=entropy_bonus`."""

    needs = frozenset({"entropy", "all_rows"})
    controls = frozenset({"entropy"})
    metrics = {"entropy": "nats per token: mean entropy of the distributions that the update saw"}

    @dataclass
    class Config:
        coef: float = 1e-3  # beta, at least 0; in use from 1e-4 to 1e-2, the larger for small vocabularies

        def __post_init__(self):
            if not self.coef >= 0:
                raise ValueError(f"coef is at least 0, got {self.coef}")

    @hookimpl
    def regularizer(self, batch, out):
        self.log("entropy", masked_mean(out.entropy.detach(), batch.mask), int(batch.mask.sum()))
        return -self.config.coef * out.entropy, "token_mean"
