"""The rewards of `task=digit_picks`: a vector for each answer, and the mean of the best one for methods that want a number.

    M_i [m, 4]    odd, even, large, small of each well-formed answer in completion i; empty if there is none
    r_i           = max over the answers of mean_j M_ij; 0 if there is none

The vector `picks_answers` is what algo=vpo and its relatives read; the number is the total of all others. In evaluation
it measures a pool of answers, so that one answer to a completion and several compare at equal counts. A prompt of
another task has no reward.
"""

from dataclasses import dataclass

import torch

from grpozoo import Plugin, hookimpl
from grpozoo.rewards.answers import asked, worth
from grpozoo.tasks.digit_picks import COMPONENTS, answers, components


class Picks(Plugin):
    """`task=digit_picks reward=picks`."""

    metrics = {"well_formed": "share of the answers asked for, 0 to 1: three different positions"}

    @dataclass
    class Config:
        weight: float = 1.0  # of the number in the total

    @hookimpl
    def validate(self, config):
        if config.task.get("kind") != "digit_picks":
            return f"{self.name}: it scores prompts of task=digit_picks alone; others have no reward"
        return None

    @hookimpl
    def reward(self, rollouts):
        matrices = [self.matrix(*pair) for pair in zip(rollouts.prompts, rollouts.text, strict=True)]
        numbers = [float(M.mean(1).max()) if len(M) else 0.0 for M in matrices]
        return {self.name: numbers, f"{self.name}_answers": matrices}

    @hookimpl
    def evaluate(self, rollouts, rewards):
        m = max(map(asked, rollouts.prompts))
        matrices = rewards.vectors.get(f"{self.name}_answers")
        if matrices is None:
            return None
        return {f"{self.name}/{name}": value for name, value in worth(rollouts, matrices, None, m).items()}

    def matrix(self, prompt, text):
        """[m, d] float64; a line of NaN for the prompt of another task."""
        if "digits" not in prompt.extra:
            return torch.full((1, len(COMPONENTS)), torch.nan, dtype=torch.float64)
        digits, collinear = prompt.extra["digits"], prompt.extra["collinear"]
        lines = [components(digits, picks, collinear) for picks in answers(prompt, text)]
        self.log("well_formed", len(lines) / asked(prompt), asked(prompt))
        return torch.tensor(lines, dtype=torch.float64).reshape(-1, len(COMPONENTS))
