"""The completion has the form that a regular expression describes; the default is DeepSeek-R1's (arXiv:2501.12948).

    r_i = 1[ pattern matches text_i ]            match: full = from the first character to the last, search = anywhere

The text is the completion without special tokens and otherwise untouched. If the chat template opens <think> in the
prompt, the completion lacks it: change the pattern. Matching has a time limit of its own, because an unlucky pattern
can backtrack for ever: such a row gets no answer (it leaves its group) and counts in `format/failures`.
"""

from dataclasses import dataclass
from enum import Enum

import regex  # not re: it takes a time limit

from grpozoo import Plugin, hookimpl

Match = Enum("Match", ["full", "search"])
INSIDE = r"(?:(?!</?(?:think|answer)>).)*"  # anything but one of the tags
R1 = rf"(?s)\s*<think>{INSIDE}</think>\s*<answer>{INSIDE}</answer>\s*"


class Format(Plugin):
    """`reward=format`; usually beside a reward for the answer, with a smaller weight."""

    metrics = {"failures": "share of completions, 0 to 1: matching took longer than `seconds`, no answer"}

    @dataclass
    class Config:
        pattern: str = R1  # regular expression; (?s) lets the dot match newlines
        match: Match = Match.full
        seconds: float = 1.0  # time limit per completion
        weight: float = 1.0  # in the total

        def __post_init__(self):
            try:
                regex.compile(self.pattern)
            except regex.error as error:
                raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}") from None
            if not self.seconds > 0:
                raise ValueError(f"seconds is positive, got {self.seconds}")

    def __init__(self, config):
        super().__init__(config)
        pattern = regex.compile(config.pattern)
        self.matches = pattern.fullmatch if config.match is Match.full else pattern.search

    @hookimpl
    def reward(self, rollouts):
        answers = [self.judge(text) for text in rollouts.text]
        self.log("failures", answers.count(None) / max(len(answers), 1), len(answers))
        return {self.name: answers}

    def judge(self, text):
        try:
            return float(self.matches(text, timeout=self.config.seconds) is not None)
        except TimeoutError:
            return None
