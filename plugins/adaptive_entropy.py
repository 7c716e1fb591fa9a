"""Adaptive entropy coefficient (Skywork-OR1, "MAGIC", arXiv:2505.22312): a bonus that a controller switches and sizes.

    loss = L - on c mean_m(H)                            mean over all tokens of the optimizer step, H with gradient
    h    = mean entropy of the step's tokens, nats       by the policy before the step's first update
    after the step
        c  <- clip(c + (delta if h < target else -delta), c_min, c_max)
        on <- 1[h < target]                              from init: c = init, on = 1

What a step's entropy decides acts on the next step. A step without an entropy (no tokens, NaN) decides nothing. It adds
a term and reads nothing of the others: it stacks on any advantage and any surrogate.
"""

import math
from dataclasses import dataclass

from grpozoo import Plugin, hookimpl, masked_mean


class AdaptiveEntropy(Plugin):
    """`algo=adaptive_entropy`."""

    needs = frozenset({"entropy", "all_rows"})
    controls = frozenset({"entropy"})
    metrics = {
        "coef": "1: c, weight of the entropy in this step's loss while it is on",
        "enabled": "0 or 1: whether the bonus is on in this step",
        "entropy": "nats per token: h, mean entropy before the step's first update",
    }

    @dataclass
    class Config:
        init: float = 0.0  # c of the first step, in [coef_min, coef_max]
        target: float = 0.2  # nats per token
        delta: float = 1e-4  # how far c moves in a step, at least 0; the authors' library has 1e-3
        coef_min: float = 0.0  # lowest c, at least 0
        coef_max: float = 5e-3  # highest c; the authors' library has 0.5

        def __post_init__(self):
            if not 0 <= self.coef_min <= self.coef_max:
                raise ValueError(f"0 <= coef_min <= coef_max, got {self.coef_min} and {self.coef_max}")
            if not self.coef_min <= self.init <= self.coef_max:
                raise ValueError(f"init lies in [{self.coef_min}, {self.coef_max}], got {self.init}")
            for name in ("target", "delta"):
                if not getattr(self, name) >= 0:
                    raise ValueError(f"{name} is at least 0, got {getattr(self, name)}")

    def __init__(self, config):
        super().__init__(config)
        self.coef, self.enabled = config.init, True
        self.entropy: float | None = None  # h of the step at hand; None: nothing to decide by

    @hookimpl
    def before_update(self, rollouts):
        mask = rollouts.completion_mask
        h = masked_mean(rollouts.entropy.double(), mask).item() if bool(mask.any()) else math.nan
        self.entropy = None if math.isnan(h) else h
        self.log("coef", self.coef)
        self.log("enabled", self.enabled)
        self.log("entropy", h)

    @hookimpl
    def regularizer(self, out):
        return (-self.coef * out.entropy, "token_mean") if self.enabled and self.coef else None

    @hookimpl
    def after_step(self):
        if self.entropy is None:
            return
        low = self.entropy < self.config.target
        moved = self.coef + (self.config.delta if low else -self.config.delta)
        self.coef = min(max(moved, self.config.coef_min), self.config.coef_max)
        self.enabled, self.entropy = low, None

    def state_dict(self):
        return {"coef": self.coef, "enabled": self.enabled, "entropy": self.entropy}

    def load_state_dict(self, state):
        self.coef = state.get("coef", self.coef)
        self.enabled = state.get("enabled", self.enabled)
        self.entropy = state.get("entropy", self.entropy)
