r"""Rewards of single steps, for problems that come with the right ones (the input of `algo=process`, arXiv:2402.03300).

    completion   s_1 separator s_2 separator ... s_m marker answer
    r_j          = 1 if s_j is one of the right steps and did not occur before, else 0
    r_{m+1}      = the task's verdict on the completion; left out where the task has none

`Prompt.extra["steps"]` holds the right steps: texts, or {lhs, rhs} for lhs=rhs. Blanks are ignored, so is their order:
independent steps may be worked either way. A step ends with its separator, the last one (the answer) with the last
token, stop token included. A prompt without steps has an empty matrix. A vector has no weight and no part in the
total, so this reward stands beside one that gives a number, `reward=[answer,steps]`; alone it would leave every row
without a reward.
"""

import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

import torch

from grpozoo import Plugin, UserError, hookimpl


class Steps(Plugin):
    """`algo=process reward=[answer,steps]`."""

    metrics = {"right": "share of written steps, 0 to 1: right ones, the answer apart"}

    @dataclass
    class Config:
        separator: str = r"[;\n]"  # regular expression that ends a step
        marker: str | None = "#"  # text that begins the answer; null: nothing does

        def __post_init__(self):
            try:
                empty = re.search(self.separator, "") is not None
            except re.error as error:
                raise ValueError(f"separator {self.separator!r} is not a regular expression: {error}") from None
            if empty or self.marker == "":
                raise ValueError("separator and marker match at least one character (marker: or null)")

    def __init__(self, config):
        super().__init__(config)
        self.found = False  # a prompt with steps, at least once

    @hookimpl
    def reward(self, rollouts, run):
        self.found = self.found or any("steps" in prompt.extra for prompt in rollouts.prompts)
        if len(rollouts) and not self.found:
            raise UserError(
                f"plugins.{self.name}: the prompts of {type(run.task).__name__} have no extra['steps'] to compare with\n"
                "drop this reward, or take a task that has them: task=arithmetic"
            )
        return {self.name: [self.judge(rollouts, row, run) for row in range(len(rollouts))]}

    def judge(self, rollouts, row, run):
        """[m, 2] float64: (index of the last token, reward) of each step of a completion."""
        prompt, token = rollouts.prompts[row], rollouts.completion_mask[row].nonzero()[:, 0]  # [L]
        if "steps" not in prompt.extra or not len(token):
            return torch.zeros(0, 2, dtype=torch.float64)
        ids = rollouts.completion_ids[row, token].tolist()
        right, ends, values = Counter(self.right(prompt)), [], []
        for step, characters in self.written(run.policy.decode(ids)):
            values.append(float(right[step] > 0))
            right[step] -= 1
            length = bisect_left(range(len(ids)), characters, key=lambda n: len(run.policy.decode(ids[:n])))
            ends.append(length - 1)
        if values:
            self.log("right", sum(values) / len(values), len(values))
        verdict = run.task.verify(prompt, rollouts.text[row])
        if verdict is not None:
            ends, values = [*ends, len(ids)], [*values, float(verdict)]
        ends[-1:] = [len(ids) - 1 for _ in ends[-1:]]  # what stops the completion belongs to its last step
        return torch.tensor([*zip(token[ends].tolist(), values, strict=True)], dtype=torch.float64).reshape(-1, 2)

    def written(self, text):
        """(step without blanks, characters up to its end) of what stands before the marker."""
        work = text.partition(self.config.marker)[0] if self.config.marker else text
        start = 0
        for match in [*re.finditer(self.config.separator, work), None]:
            stop, end = match.span() if match else (len(work), len(work))
            if step := "".join(work[start:stop].split()):
                yield step, end
            start = end

    def right(self, prompt):
        """The prompt's right steps without blanks."""
        for step in prompt.extra["steps"]:
            if not isinstance(step, str):
                step = f"{step['lhs']}={step['rhs']}"
            yield "".join(step.split())

    def state_dict(self):
        return {"found": self.found}

    def load_state_dict(self, state):
        self.found = state.get("found", False)
