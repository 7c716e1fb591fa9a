"""Weights for a sampler that is not quite the trainer: truncated and masked importance sampling.

    rho_t   = pi_old(o_t) / pi_sampler(o_t)        old: the trainer's numbers before the first update
    token       rho = rho_t                        biased, small variance
    sequence    rho = prod_t rho_t                 unbiased, its variance grows with the length
    geometric   rho = (prod_t rho_t)^(1/L)         a test of the completion, no weight
    truncate    w = clip(rho, c_min, c_max)        TIS (Yao et al. 2025, "Your efficient RL framework secretly brings
                                                   you off-policy RL training"): algo=tis
    mask        w = rho where c_min <= rho <= c_max, else 0; IcePop (arXiv:2510.18855) for tokens: algo=icepop
                for geometric 1 instead of rho

The weights are constants and multiply the policy loss of a token, not the regularisers, so they stack on any advantage
and any loss. A ratio of whole completions (GSPO) wants a weight of whole completions: level=token is refused with it.
Completions that nobody sampled (traces of another source) have no sampler: their weight is 1.
"""

import math
from dataclasses import dataclass
from enum import Enum

import torch

from grpozoo import Plugin, UserError, hookimpl, masked_mean, masked_sum

Level = Enum("Level", ["token", "sequence", "geometric"])
Mode = Enum("Mode", ["truncate", "mask"])


class Mismatch(Plugin):
    """`algo=[NAME,mismatch]`, or its presets `tis` and `icepop`."""

    metrics = {
        "weight": "1, at least 0: mean weight of a token (1: sampler and trainer agree)",
        "outside": "share of tokens, 0 to 1: rho outside [c_min, c_max]",
    }

    @dataclass
    class Config:
        level: Level = Level.sequence  # whose ratio: of a token, of a completion, its geometric mean
        mode: Mode = Mode.mask  # outside the range: truncate to its end, or weight 0
        c_min: float | None = None  # lower end, at least 0; null: none
        c_max: float | None = 3.0  # upper end; null: none; published 2 (TIS), 5 (IcePop); geometric about 1.001
        normalize: bool = False  # divide by the mean over the optimizer step, of tokens or completions as in `level`

        def __post_init__(self):
            if self.low < 0 or self.low > self.high:
                raise ValueError(f"0 <= c_min <= c_max, got c_min={self.c_min}, c_max={self.c_max}")
            if self.level is Level.geometric and self.mode is Mode.truncate:
                raise ValueError("level=geometric keeps or drops completions, it has no weight to truncate: mode=mask")

        @property
        def low(self):
            return self.c_min or 0.0

        @property
        def high(self):
            return math.inf if self.c_max is None else self.c_max

    def __init__(self, config):
        super().__init__(config)
        if not config.normalize:
            self.minibatch = None  # no hook then: the core measures old log-probabilities for whoever answers it

    @hookimpl
    def validate(self, config):
        whole = [name for name in ("gspo", "gspo_token", "luspo") if name in config.plugins]
        if whole and self.config.level is Level.token:
            raise UserError(
                f"plugins.{self.name}.level=token does not stack with {whole[0]}: its ratio belongs to the whole "
                f"completion, and so must the correction\nuse plugins.{self.name}.level=sequence or geometric"
            )

    @hookimpl
    def minibatch(self, batch):
        weights, sampled = self.weights(batch), self.sampled(batch)
        counted = batch.mask & sampled
        if self.config.level is Level.token:
            mean = masked_mean(weights, counted)
        else:
            mean = masked_mean(weights[:, 0], counted.any(1))
        return {self.name: torch.where(sampled & (mean > 0), weights / mean, weights)}  # all dropped: they stay 0

    @hookimpl
    def token_weights(self, batch):
        weights = batch.tables[self.name] if self.config.normalize else self.weights(batch)  # [r, T]
        rho, tokens = self.rho(batch), int(batch.mask.sum())
        outside = ((rho < self.config.low) | (rho > self.config.high)) & self.sampled(batch)
        self.log("weight", masked_mean(weights, batch.mask), tokens)
        self.log("outside", masked_sum(outside, batch.mask) / max(tokens, 1), tokens)
        return weights

    def rho(self, batch):
        """[r, T], its logarithm clamped to +-20; 1 where masked, except where the row shares one value."""
        gap = (batch.old_logprobs - batch.sampler_logprobs).masked_fill(~batch.mask, 0)
        if self.config.level is Level.sequence:
            gap = masked_sum(gap, batch.mask, dim=1)[:, None]
        elif self.config.level is Level.geometric:
            gap = masked_mean(gap, batch.mask, dim=1)[:, None]
        return gap.clamp(-20, 20).exp().expand(batch.mask.shape)

    def weights(self, batch):
        """[r, T], before they are normalised."""
        rho, low, high = self.rho(batch), self.config.low, self.config.high
        if self.config.mode is Mode.truncate:
            weights = rho.clamp(low, high)
        else:
            kept = torch.ones_like(rho) if self.config.level is Level.geometric else rho
            weights = kept.masked_fill((rho < low) | (rho > high), 0)
        return weights.masked_fill(~self.sampled(batch), 1)

    def sampled(self, batch):
        """[r, 1] bool: the policy sampled the completion."""
        own = [name == "policy" for name in batch.rollouts.policy]
        return torch.tensor(own, dtype=torch.bool, device=batch.mask.device)[:, None]
