"""A number in the completion equals the number in the prompt's answer.

    r_i = 1[ |x - y| <= max(abs_tol, rel_tol max(|x|, |y|)) ]       0 where the completion has no number

x is the last number of the completion or, with a marker, the first one after the marker's last occurrence; y is the
last number of the answer. Numbers are 12, -3.5, 1,234, .5, 2e-3 and fractions a/b; arithmetic is decimal, to 200
digits. A sign that joins two terms is none (12-5 ends in 5). Units, $ and % around a number are dropped: 50% equals
50, not 0.5. A prompt whose answer has no number gets no answer, so its rows leave their group.
"""

import re
from dataclasses import dataclass
from decimal import Context, Decimal

from grpozoo import Plugin, UserError, hookimpl

EXACT = Context(prec=200, traps=[])  # no traps: 1/0 and 1e999999999999 become infinite or NaN, and then no number
UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
NUMBER = re.compile(rf"(?P<sign>(?<![\w)\]}}])[-+\u2212][$€£]?)?(?P<over>{UNSIGNED})(?:/(?P<under>{UNSIGNED}))?")


class Numeric(Plugin):
    """`reward=numeric`, for tasks whose answers are numbers."""

    @dataclass
    class Config:
        marker: str | None = None  # text before the answer, e.g. "####"; null: the last number counts
        abs_tol: float = 0.0  # absolute tolerance, in the answer's unit
        rel_tol: float = 0.0  # relative tolerance; both 0: exactly equal
        weight: float = 1.0  # in the total

        def __post_init__(self):
            for name in ("abs_tol", "rel_tol"):
                if not 0 <= getattr(self, name) < float("inf"):
                    raise ValueError(f"{name} is at least 0, got {getattr(self, name)}")
            if self.marker == "":
                raise ValueError("marker is a text of at least one character, or null")

    def __init__(self, config):
        super().__init__(config)
        self.answered = False  # a prompt had a number to compare with

    @hookimpl
    def reward(self, rollouts):
        targets = [last_number(prompt.answer or "") for prompt in rollouts.prompts]
        self.answered = self.answered or any(target is not None for target in targets)
        if targets and not self.answered:
            raise UserError(
                f"plugins.{self.name}: no prompt has a number in its answer, e.g. {rollouts.prompts[0].answer!r}\n"
                "try reward=answer, reward=math or reward=function"
            )
        return {self.name: [self.compare(text, target) for text, target in zip(rollouts.text, targets, strict=True)]}

    def compare(self, text, target):
        if target is None:
            return None
        value = last_number(text) if self.config.marker is None else number_after(text, self.config.marker)
        return 0.0 if value is None else float(self.close(value, target))

    def close(self, x, y):
        absolute, relative = (Decimal(repr(tolerance)) for tolerance in (self.config.abs_tol, self.config.rel_tol))
        scale = EXACT.multiply(relative, max(x.copy_abs(), y.copy_abs()))
        return EXACT.subtract(x, y).copy_abs() <= max(absolute, scale)

    def state_dict(self):
        return {"answered": self.answered}

    def load_state_dict(self, state):
        self.answered = state.get("answered", False)


def last_number(text: str) -> Decimal | None:
    """The last finite number of a text."""
    values = [value for match in NUMBER.finditer(text) if (value := to_number(match)) is not None]
    return values[-1] if values else None


def number_after(text: str, marker: str) -> Decimal | None:
    """The first number after the last occurrence of `marker`."""
    _, found, rest = text.rpartition(marker)
    match = NUMBER.search(rest) if found else None
    return to_number(match) if match else None


def to_number(match: re.Match) -> Decimal | None:
    over, under = (EXACT.create_decimal((match[part] or "1").replace(",", "")) for part in ("over", "under"))
    value = EXACT.divide(over, under)
    if not value.is_finite():
        return None
    return value.copy_negate() if (match["sign"] or "+")[0] in "-\u2212" else value
