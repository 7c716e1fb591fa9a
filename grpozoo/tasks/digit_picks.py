"""Pick three of six digits: four rewards that pull in different directions, and prompts that ask for several answers.

    prompt      314159/1=                 one answer: three different positions, 1 to 6, in any order
    completion  135                       the digits 3, 4, 5
    prompt      314159/3=                 three answers, each after its number
    completion  <1>135<2>246<3>456

Components of an answer, each in [0, 1]; all are 0 for what is no answer:

    odd    picked odd digits / 3          large  sum of the picked digits / 27
    even   picked even digits / 3         small  sum of the digits below 5 that were left / 27

Odd and even exclude each other, and neither goes with the three largest digits. With `collinear` all four are replaced
by their mean: the control in which nothing is to be gained from weighing them differently. A completion is right if it
has all the answers that it was asked for and the best of them is among the best ten of the twenty choices by its mean.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations

from grpozoo.tasks import Task
from grpozoo.tasks.hashing import digest, stable_int
from grpozoo.types import Prompt

DIGITS, PICKED = 6, 3
COMPONENTS = ("odd", "even", "large", "small")
GOOD = 10  # of the twenty choices
CHOICES = tuple(combinations(range(DIGITS), PICKED))


class DigitPicks(Task):
    """`task=digit_picks reward=picks`."""

    @dataclass
    class Config:
        answers: int = 1  # that a prompt asks for; the warm start learns this form
        collinear: bool = False  # all components are their mean
        train: int = 20000  # prompts
        heldout: int = 256  # prompts, their digits apart from the training prompts'
        skilled: float = 0.0  # share of the worked answers that are the best in a component; warm-up data only

        def __post_init__(self):
            if not 1 <= self.answers <= 9:
                raise ValueError(f"answers lies in [1, 9], got {self.answers}")
            for name in ("train", "heldout"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
            if not 0 <= self.skilled <= 1:
                raise ValueError(f"skilled lies in [0, 1], got {self.skilled}")
            if self.train + self.heldout > 10**DIGITS:
                raise ValueError(f"there are {10**DIGITS} prompts, train + heldout is {self.train + self.heldout}")

    def __init__(self, config: Config):
        super().__init__(config)
        numbers = random.Random(stable_int("digit_picks")).sample(range(10**DIGITS), config.train + config.heldout)
        prompts = [self._prompt(f"{number:0{DIGITS}d}") for number in numbers]
        self.train: Sequence[Prompt] = prompts[: config.train]
        self.heldout: Sequence[Prompt] = prompts[config.train :]

    def verify(self, prompt: Prompt, completion: str) -> float:
        """1.0 if every answer is there and the best of them is among the best `GOOD` choices, else 0.0."""
        found = answers(prompt, completion)
        if len(found) < prompt.extra["answers"]:
            return 0.0
        digits = prompt.extra["digits"]
        return float(max(mean(digits, picks) for picks in found) > bar(digits) + 1e-9)

    def solution(self, prompt: Prompt) -> str:
        """Random answers, positions ascending, the same ones for a prompt each time: a form to learn, and no preference.

        The share `skilled` of them is as good as can be in one component, so that the policy learns what digits are worth.
        """
        rng = random.Random(stable_int("picks", prompt.id))
        picks = [rng.choice(CHOICES) for _ in range(prompt.extra["answers"])]
        if self.config.skilled:
            picks = [_specialist(prompt.id, rng) if rng.random() < self.config.skilled else p for p in picks]
        texts = ["".join(str(i + 1) for i in p) for p in picks]
        return texts[0] if len(texts) == 1 else "".join(f"<{i}>{text}" for i, text in enumerate(texts, 1))

    def fingerprint(self) -> str:
        """Hash of the configuration, which decides the prompts."""
        return digest([json.dumps(asdict(self.config), sort_keys=True)])

    def _prompt(self, digits: str) -> Prompt:
        m = self.config.answers
        extra = {"digits": digits, "answers": m, "several": digits + "/{answers}=", "collinear": self.config.collinear}
        return Prompt(digits, text=f"{digits}/{m}=", extra=extra)


def answers(prompt: Prompt, completion: str) -> list[tuple[int, ...]]:
    """The well-formed answers, in the order of their numbers: positions from 0, ascending. Anything else is none."""
    m = prompt.extra["answers"]
    blocks = [completion] if m == 1 else [_block(completion, i) for i in range(1, m + 1)]
    return [tuple(sorted(int(sign) - 1 for sign in block)) for block in blocks if _well_formed(block)]


def components(digits: str, picks: Sequence[int], collinear: bool = False) -> list[float]:
    """The d rewards of one answer."""
    picked = [int(digits[i]) for i in picks]
    left = [int(digit) for i, digit in enumerate(digits) if i not in picks]
    odd = sum(digit % 2 for digit in picked)
    small = sum(digit for digit in left if digit < 5)
    values = [odd / PICKED, (PICKED - odd) / PICKED, sum(picked) / (9 * PICKED), small / (9 * PICKED)]
    return [sum(values) / len(values)] * len(values) if collinear else values


def mean(digits: str, picks: Sequence[int]) -> float:
    """The scalar reward of one answer, 0 to 1."""
    return sum(components(digits, picks)) / len(COMPONENTS)


@cache
def bar(digits: str) -> float:
    """The scalar reward that a good answer exceeds; at most `GOOD` choices do."""
    return sorted(mean(digits, picks) for picks in CHOICES)[-GOOD - 1]


def _specialist(digits: str, rng: random.Random) -> tuple[int, ...]:
    """One of the best choices by one component."""
    component = rng.randrange(len(COMPONENTS))
    worth = {picks: components(digits, picks)[component] for picks in CHOICES}
    return rng.choice([picks for picks in CHOICES if worth[picks] == max(worth.values())])


def _block(completion: str, number: int) -> str:
    """What stands between the number's first tag and the next tag."""
    found = re.search(rf"<{number}>([^<]*)", completion)
    return found[1] if found else ""


def _well_formed(block: str) -> bool:
    return bool(re.fullmatch(rf"[1-{DIGITS}]{{{PICKED}}}", block)) and len(set(block)) == PICKED
