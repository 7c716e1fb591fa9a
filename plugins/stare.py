"""STARE: surprisal-guided token-level advantage reweighting (arXiv:2606.19236), a closed loop on the policy's entropy.

    s     = -log pi(o)                      surprisal of the sampled token, nats
    T+-   = {A > 0}, {A < 0}                by the sign of the token's own advantage; A = 0 is in neither
    L+-   = the k of highest s in T+-       k = min(n, max(1, floor(n P + 0.999999))) of n, 0 if n P = 0; U+- = the rest
    g     = 1[H < H_tgt]                    H = mean entropy of the step's tokens before its first update, nats
    loss <- (1 + g (w - 1)) loss            w from TABLE: O1 has W on L+, C2 also M on L-; the divisor stays
    adaptive, before the loss:  W <- clip(W + alpha sign(H_tgt - H), 1, w_max),  M <- clip(M - ..., m_min, 1)

To first order in the logits, a step eta along A grad log pi changes the entropy H_t of its position by -eta A Phi:
    Phi   = p (ln p + H_t) - sum_v pi_v^2 (ln pi_v + H_t),   p = pi(o)
    W*    = 1 + sum A Phi / -(sum over L+ of A Phi)          O1 raises the entropy only with W above W*
W* grows as completions get shorter, from little over 1 at hundreds of tokens to 6 at 5: measure it (w_star_every).

It reads only the sign of A, and a surrogate that is positively homogeneous in A has omega loss(A) = loss(omega A): it
stacks on any advantage and any surrogate per token. With one ratio per completion, omega acts through its mean.
"""

import math
from dataclasses import dataclass
from enum import Enum

import torch

from grpozoo import Plugin, hookimpl, masked_mean, masked_sum, top_k_mask

TABLE = {  # factors of L+, U+, L-, U-; the entropy rises by W on L+ or U- and by M on U+ or L-
    "O1": "W111", "C2": "W1M1",  # released by the authors
    "O4": "11M1", "attenuate_Upos": "1M11", "amplify_Uneg": "111W", "C1": "W11W", "C3": "1M1W", "C4": "1MM1",
}  # fmt: skip
Variant = Enum("Variant", list(TABLE))
Gate = Enum("Gate", ["batch", "sample", "token"])
Scope = Enum("Scope", ["batch", "micro"])
Source = Enum("Source", ["current", "old"])


class Stare(Plugin):
    """`algo=stare`."""

    controls = frozenset({"entropy"})
    conflicts = {
        "kl_cov": "both choose tokens by advantage and log-probability, one to hold back and one to weight",
        "clip_cov": "both choose tokens by advantage and log-probability, one to silence and one to weight",
        "entropy_mask": "it silences most tokens, and those that it keeps overlap the ones that STARE weights",
    }
    metrics = {
        "gate": "0 or 1: the step's entropy is below the target",
        "duty": "share of steps, 0 to 1: `gate` over the run so far",
        "entropy": "nats per token: of the step's completions before its first update",
        "entropy_missing": "0 or 1: the entropy was not finite, so gate and weights stayed as they were",
        "reweight_w": "factor: W of the step",
        "reweight_m": "factor: M of the step",
        "selected": "share of tokens, 0 to 1: L+, the most surprising ones of positive advantage",
        "surprisal": "nats: mean over L+",
        "weight": "factor: mean over all tokens",
        "raising": "share of L+, 0 to 1: Phi < 0, more probability raises the entropy (every w_star_every steps)",
        "w_star": "factor: critical W of O1; absent if L+ does not raise the entropy (every w_star_every steps)",
    }

    @dataclass
    class Config:
        enabled: bool = True  # false: GRPO
        variant: Variant = Variant.O1  # which tokens are weighted; experimental but for O1 and C2
        top_p_ratio: float = 0.1  # P, share of T+ (of T-) that is surprising, 0 to 1
        reweight_w: float = 1.1  # W, at least 1; published 1.05 for 14B and 32B
        reweight_m: float = 0.9  # M, 0 to 1; published 0.95 for 14B and 32B
        target_entropy: float = 0.3  # H_tgt, nats per token; choose it below the entropy at the start
        gate: Gate = Gate.batch  # by the entropy of the step, completion or position; experimental but for batch
        adaptive: bool = False  # W and M follow the entropy
        alpha: float = 0.01  # their change per step, at least 0
        w_max: float = 1.5  # highest adaptive W
        m_min: float = 0.5  # lowest adaptive M
        quantile_scope: Scope = Scope.batch  # P of an optimizer step; micro: of a micro-batch, as released
        surprisal_from: Source = Source.current  # the policy now, or old: before the step's first update
        w_star_every: int = 0  # steps from one measurement of W* to the next, each a forward pass; 0: never

        def __post_init__(self):
            limits = {
                "top_p_ratio": (0, 1),
                "reweight_w": (1, math.inf),
                "reweight_m": (0, 1),
                "m_min": (0, 1),
                "w_max": (1, math.inf),
            }
            for name in (*limits, "target_entropy", "alpha", "w_star_every"):
                low, high = limits.get(name, (0, math.inf))
                if not low <= getattr(self, name) <= high:
                    raise ValueError(f"{name} lies in [{low}, {high}], got {getattr(self, name)}")
            if self.adaptive and not (self.reweight_w <= self.w_max and self.reweight_m >= self.m_min):
                raise ValueError("adaptive needs reweight_w <= w_max and reweight_m >= m_min")

    def __init__(self, config):
        super().__init__(config)
        self.gate, self.W, self.M, self.entropy = True, config.reweight_w, config.reweight_m, None
        self.steps = self.opened = 0  # of the run; those with the gate on
        self.needs = frozenset({"entropy", "old_logprobs"} if config.w_star_every else {"entropy"})
        if not config.enabled:  # without hooks the core measures nothing for them either: GRPO bit for bit
            self.needs, self.controls, self.conflicts = frozenset(), frozenset(), {}
            self.before_update = self.minibatch = self.token_weights = None

    @hookimpl
    def validate(self):
        names = {"variant": self.config.variant.name, "gate": self.config.gate.name}
        tried = [f"{key}={name}" for key, name in names.items() if name not in ("O1", "C2", "batch")]
        if tried and self.config.enabled:
            return f"{self.name}: {', '.join(tried)} is experimental; the authors released O1 and C2 with gate=batch"

    @hookimpl
    def before_update(self, rollouts, advantages, run):
        mask, every = rollouts.completion_mask, self.config.w_star_every
        self.control(masked_mean(rollouts.entropy.double(), mask).item() if mask.any() else math.nan)
        if every and run.step % every == 0:
            self.measure(rollouts, advantages, run)

    @hookimpl
    def minibatch(self, batch, out):
        return {f"{self.name}/omega": self.omega(batch, out)} if self.config.quantile_scope is Scope.batch else None

    @hookimpl
    def token_weights(self, batch, out):
        batchwide = self.config.quantile_scope is Scope.batch
        return batch.tables[f"{self.name}/omega"] if batchwide else self.omega(batch, out)

    def control(self, h):
        """Gate, W and M follow the step's entropy; one that is not finite changes nothing."""
        c = self.config
        if math.isfinite(h):
            self.entropy, self.gate = h, h < c.target_entropy
            if c.adaptive and c.alpha:
                step = c.alpha * ((h < c.target_entropy) - (h > c.target_entropy))
                self.W, self.M = min(max(self.W + step, 1.0), c.w_max), max(min(self.M - step, 1.0), c.m_min)
            self.log("entropy", h)
        self.steps, self.opened = self.steps + 1, self.opened + self.gate
        seen = {"gate": self.gate, "duty": self.opened / self.steps, "entropy_missing": not math.isfinite(h)}
        for name, value in {**seen, "reweight_w": self.W, "reweight_m": self.M}.items():
            self.log(name, value)

    def omega(self, batch, out):
        """[r, T], without gradient."""
        c, mask = self.config, batch.mask
        s = -(out.logprobs if c.surprisal_from is Source.current else batch.old_logprobs).detach()  # [r, T]
        up, down = mask & (batch.advantages > 0), mask & (batch.advantages < 0)  # T+, T-
        L, below = self.select(s, up), self.select(s, down)  # L+, L-
        omega, factor = torch.ones_like(s), {"W": self.W, "M": self.M, "1": 1.0}
        for quadrant, letter in zip((L, up & ~L, below, down & ~below), TABLE[c.variant.name], strict=True):
            omega = omega.masked_fill(quadrant, factor[letter])
        h = batch.rollouts.entropy  # [r, T]
        h = masked_mean(h.double(), mask, 1)[:, None] if c.gate is Gate.sample else h
        omega = omega.where(mask.new_tensor(self.gate) if c.gate is Gate.batch else h < c.target_entropy, 1.0)
        tokens, chosen = int(mask.sum()), int(L.sum())
        self.log("selected", chosen / max(tokens, 1), tokens)
        self.log("surprisal", masked_mean(s, L), chosen)
        self.log("weight", masked_mean(omega, mask), tokens)
        return omega

    def select(self, s, candidates):
        """[r, T] bool: exactly k of the candidates, ties by position."""
        n, P = int(candidates.sum()), self.config.top_p_ratio
        return top_k_mask(s, candidates, min(n, max(1, math.floor(n * P + 0.999999))) if n and P else 0)

    def measure(self, rollouts, advantages, run):
        """Phi and W* of the step's tokens under the policy before the first update."""
        mask, S = rollouts.completion_mask, torch.zeros_like(rollouts.entropy)
        for rows, part in run.mine(rollouts, list(range(len(rollouts)))):
            S[rows, : part.completion_mask.shape[1]] = run.policy.covariance(part).to(S)
        A, log_p = advantages.double(), rollouts.old_logprobs.double()
        phi = log_p.exp() * (log_p + rollouts.entropy) - run.sum(S)  # [R, T]
        L = self.select(-log_p, mask & (A > 0))
        fall, rise = float(masked_sum(A * phi, mask)), -float(masked_sum(A * phi, L))
        self.log("raising", masked_mean((phi < 0).double(), L), int(L.sum()))
        if rise > 0:
            self.log("w_star", 1 + fall / rise)

    def state_dict(self):
        return {name: getattr(self, name) for name in ("gate", "W", "M", "entropy", "steps", "opened")}

    def load_state_dict(self, state):
        vars(self).update(state)
