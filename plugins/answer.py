"""The task's own verdict: 1 for a right answer, 0 for a wrong one, between where the task gives partial credit.

    r_i = task.verify(prompt_i, text_i)

`text` is the completion as decoded, without special tokens and otherwise untouched: no stripping, no lower case.
It composes with every other reward by its weight.
"""

from dataclasses import dataclass

from grpozoo import Plugin, UserError, hookimpl
from grpozoo.tasks import Task


class Answer(Plugin):
    """`reward=answer`, the default."""

    @dataclass
    class Config:
        weight: float = 1.0  # in the total

    def __init__(self, config):
        super().__init__(config)
        self.verified = False  # the task has given a verdict at least once

    @hookimpl
    def reward(self, rollouts, run):
        verdicts = [run.task.verify(prompt, text) for prompt, text in zip(rollouts.prompts, rollouts.text, strict=True)]
        self.verified = self.verified or any(verdict is not None for verdict in verdicts)
        if verdicts and not self.verified:
            kind = type(run.task)
            first = f"gives no verdict: no prompt so far has an answer, the first is {rollouts.prompts[0].id!r}"
            raise UserError(
                f"plugins.{self.name}: the task {kind.__name__} {'has no verifier' if kind.verify is Task.verify else first}\n"
                "compare with its answers by reward=numeric or reward=math, or bring a function of your own:\n"
                "reward=function plugins.function.path=FILE.py:FUNCTION"
            )
        return {self.name: verdicts}

    def state_dict(self):
        return {"verified": self.verified}

    def load_state_dict(self, state):
        self.verified = state.get("verified", False)
