"""Write digits that add up to a number: many right answers to each prompt, so diversity can be measured beside accuracy.

    prompt      17=
    completion  953          any digits from low to high whose sum is 17; their number is free

The sums are few (26 by default), so training and held-out prompts share them and differ in their ids only: the task
asks how many different right answers a policy keeps, not whether it generalises. A sum n has as many right answers as
n has compositions into parts low..high, up to 2^(n-1).
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from grpozoo.tasks import Task
from grpozoo.tasks.hashing import digest, stable_int, unit
from grpozoo.types import Prompt

LARGEST = 10_000  # sum: a completion of a thousand digits at least
PROMPTS = 10**7  # of a training set, all in memory


class DigitSum(Task):
    """`task=digit_sum`."""

    @dataclass
    class Config:
        low: int = 1  # smallest digit, 1 to high
        high: int = 9  # largest digit, up to 9
        min_sum: int = 5  # smallest sum, at least low
        max_sum: int = 30  # largest sum
        variants: int = 80  # training prompts of each sum; each has its own worked answer for the warm start
        wrong: float = 0.1  # share of worked answers whose last digit is wrong, [0, 1): the warm start's noise

        def __post_init__(self):
            if not 1 <= self.low <= self.high <= 9:
                raise ValueError(f"low and high are digits, 1 <= low <= high <= 9, got {self.low} and {self.high}")
            if not self.low <= self.min_sum <= self.max_sum:
                raise ValueError(f"low <= min_sum <= max_sum, got {self.low}, {self.min_sum}, {self.max_sum}")
            if self.max_sum > LARGEST:
                raise ValueError(f"max_sum is at most {LARGEST}, got {self.max_sum}")
            most = PROMPTS // (self.max_sum - self.min_sum + 1)
            if not 1 <= self.variants <= most:
                raise ValueError(
                    f"variants lies in 1..{most} (of each sum, {PROMPTS} prompts in all), got {self.variants}"
                )
            if not 0 <= self.wrong < 1:
                raise ValueError(f"wrong lies in [0, 1), got {self.wrong}")

    def __init__(self, config: Config):
        super().__init__(config)
        sums = range(config.min_sum, config.max_sum + 1)
        unreachable = [n for n in sums if not any(k * config.low <= n <= k * config.high for k in range(1, n + 1))]
        if unreachable:
            raise ValueError(f"no digits {config.low}..{config.high} add up to {unreachable[0]}")
        self.train: Sequence[Prompt] = [self._prompt(n, str(v)) for v in range(config.variants) for n in sums]
        self.heldout: Sequence[Prompt] = [self._prompt(n, "heldout") for n in sums]

    def verify(self, prompt: Prompt, completion: str) -> float:
        """1.0 if every character is an allowed digit and they add up, else 0.0."""
        allowed = {str(digit) for digit in range(self.config.low, self.config.high + 1)}
        right = bool(completion) and set(completion) <= allowed
        return float(right and sum(map(int, completion)) == int(prompt.answer))

    def solution(self, prompt: Prompt) -> str:
        """Random digits that add up, the same ones for a prompt each time; in the share `wrong` the last one is off."""
        rng = random.Random(stable_int("digits", prompt.id))
        digits = self._digits(int(prompt.answer), rng)
        if unit("wrong", prompt.id) < self.config.wrong and self.config.low < self.config.high:
            others = [d for d in range(self.config.low, self.config.high + 1) if d != digits[-1]]
            digits[-1] = rng.choice(others)
        return "".join(map(str, digits))

    def fingerprint(self) -> str:
        """Hash of the configuration, which decides the prompts."""
        return digest([json.dumps(asdict(self.config), sort_keys=True)])

    def _digits(self, n: int, rng: random.Random) -> list[int]:
        """Each next digit uniform among those after which the rest can still be made."""
        low, high = self.config.low, self.config.high
        digits = []
        while n:
            rest = [n - digit for digit in range(low, min(high, n) + 1)]
            possible = [r for r in rest if r == 0 or any(k * low <= r <= k * high for k in range(1, r + 1))]
            n, last = (chosen := rng.choice(possible)), n
            digits.append(last - chosen)
        return digits

    def _prompt(self, n: int, variant: str) -> Prompt:
        return Prompt(f"{n}/{variant}", text=f"{n}=", answer=str(n))
