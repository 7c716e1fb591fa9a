"""Soft overlong punishment (DAPO, arXiv:2503.14476, sec. 3.4).

    r_i = 0                                    L_i <= L_max - L_cache
        = (L_max - L_cache - L_i) / L_cache    L_max - L_cache < L_i <= L_max
        = -1                                   L_max < L_i

L counts the completion's tokens, stop token included. It is added to the other rewards and reads nothing of them.
"""

from dataclasses import dataclass

from grpozoo import Plugin, UserError, hookimpl


class Overlong(Plugin):
    """`reward=[answer,overlong]`."""

    metrics = {"punished": "share of completions, 0 to 1: longer than max_length - cache tokens"}

    @dataclass
    class Config:
        max_length: int | None = None  # L_max, tokens; null: max_completion_length
        cache: int | None = None  # L_cache, tokens; null: a fifth of L_max, as published (4096 of 20480)
        weight: float = 1.0  # in the total

        def __post_init__(self):
            for name in ("max_length", "cache"):
                if getattr(self, name) is not None and getattr(self, name) < 1:
                    raise ValueError(f"{name} is at least 1 token or null, got {getattr(self, name)}")

    @hookimpl
    def validate(self, config):
        longest, cache = self.limits(config)
        if cache > longest:
            raise UserError(
                f"plugins.{self.name}.cache = {cache} tokens is more than the longest completion, {longest}"
            )

    @hookimpl
    def reward(self, rollouts, run):
        longest, cache = self.limits(run.config)
        answers = ((longest - cache - rollouts.lengths.double()) / cache).clamp(-1, 0)  # [R]
        self.log("punished", (answers < 0).double().mean().item() if len(answers) else 0.0, len(answers))
        return {self.name: answers}

    def limits(self, config):
        longest = self.config.max_length or config.max_completion_length
        return longest, self.config.cache or max(longest // 5, 1)
