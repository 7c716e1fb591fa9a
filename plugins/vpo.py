"""VPO: vector policy optimisation, the expected best answer under random weights (arXiv:2605.22817).

    M_g [m, d]   rewards of the m answers in completion g, a line of d components each
    w_k          ~ Dir(alpha 1_d), k = 1..K, drawn anew for each group and step, shared by its completions
    R_g          = 1/K sum_k max_i w_k . M_gi          empty_score if there is no answer in g
    A_g          = (R_g - mean R) / (std R + eps)      GRPO's advantage; published: plugins.grpo.ddof=0 plugins.grpo.eps=1e-6

The max stands inside the mean over weights, so a set earns most that has a specialist for every weighting. Sharing w_k
matters when the group has nearly converged: equal completions then have equal R, and advantage 0. With one answer
the mean over weights is known, R = mean_j M_gj, and so with `answers=1` no weights are drawn. Sobol points cut the noise
of R two- to fourfold. The components should have one scale; one that all answers share only shifts R.

R replaces the total of the rewards and nothing else changes: it stacks on any advantage, loss, weight and sampler (the
weights have a random stream of their own), but not on what reads the components or what else fixes the total.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from grpozoo.rewards.answers import SetReward

Sampler = Enum("Sampler", ["naive", "sobol"])


class Vpo(SetReward):
    """`algo=vpo`, or `algo=vpo_paper`."""

    conflicts = {
        "gdpo": "gdpo reads reward components, and vpo changes the total",
        "process": "process reads the rewards of steps, and vpo changes the total",
        "multi_rlvr": "both reduce a completion's answers to its reward",
        "random_weighting": "both weigh the components at random",
    }

    @dataclass
    class Config:
        answers: int = 3  # m, that a completion is asked for; published 3, and 5 for EUREQA
        draws: int = 100  # K, weights of a group, at least 1; 32 to 512, or 64 to 128 with sobol
        alpha: float = 1.0  # concentration, above 0; lower: specialists, higher: compromises
        sampler: Sampler = Sampler.naive  # naive: independent | sobol: scrambled Sobol points
        empty_score: float = 0.0  # reward of a completion without answers; below the worst where rewards are negative
        component: str | None = None  # name of the vector reward; null: the only one, or the rewards of tagged answers
        instruction: str | None = (
            None  # added to prompts of tasks without a form of their own, {answers} is m; null: tags
        )

        def __post_init__(self):
            for name in ("answers", "draws"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
            if not self.alpha > 0:
                raise ValueError(f"alpha is above 0, got {self.alpha}")

    def reduce(self, sets, target, stream):
        W = self.weights(sets[0].shape[1], stream)  # [K, d], float64
        return [float((M @ W.T).amax(0).mean()) for M in sets]

    def weights(self, d, stream):
        """[K, d]: lines at least 0 that sum to 1."""
        K, alpha = self.config.draws, self.config.alpha
        if self.config.answers == 1 or d == 1:
            return torch.full((1, d), 1 / d, dtype=torch.float64)
        draw = sobol if self.config.sampler is Sampler.sobol else naive
        return torch.from_numpy(draw(stream(), K, d, alpha))


def naive(rng, K, d, alpha):
    """K independent draws; those that underflow to NaN are uniform."""
    W = rng.dirichlet([alpha] * d, K)
    return np.where(np.isfinite(W).all(1, keepdims=True), W, 1 / d)


def sobol(rng, K, d, alpha):
    """The gaps between d - 1 sorted points if alpha = 1, else d gamma quantiles over their sum."""
    from scipy.special import gammaincinv
    from scipy.stats import qmc

    scramble = int(rng.integers(2**63))  # scipy spawns from it, which a generator with a bare key cannot do
    points = qmc.Sobol(d - (alpha == 1), scramble=True, rng=scramble).random_base2((K - 1).bit_length())[:K]
    if alpha == 1:
        return np.diff(np.sort(points, 1), prepend=0.0, append=1.0)
    gamma = gammaincinv(alpha, points.clip(1e-12, 1 - 1e-12))
    total = gamma.sum(1, keepdims=True)
    return np.where(total > 0, gamma / np.where(total > 0, total, 1), 1 / d)
