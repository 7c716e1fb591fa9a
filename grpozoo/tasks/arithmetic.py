"""Chained integer arithmetic: a generator family with worked solutions, graded difficulty and an exact verifier.

    prompt      12+35+48=                        with parentheses: ((7+5)*3-4)*2=
    completion  12+35=47;47+48=95#95             each step an operation on earlier values, the answer after `#`

Without `parentheses` products come first, as usual; with them the chain is worked from left to right. A modulus is
applied to every result. `Prompt.extra` holds, for the verifier's eyes only: expression, modulus, values (of the steps),
steps ({lhs, rhs, value, source}; source is the part of the problem that the step evaluates) and scaffold,
[(source, rhs)] of all steps but the last: sub-questions that do not give earlier answers away. A share of the training
prompts (`scaffold_share`) asks them, in the form of grpozoo.tasks.scaffold, and their worked solutions fill the slots.

An answer is right if it is the integer written without leading zeros, blanks around it apart, and nothing follows.
With scratch-pad it stands after the one `#`; without it is the whole completion, `#` optional; and in chat without
scratch-pad it is the last integer after the last `#`, of the whole completion if there is none.

Which side of the split a problem is on depends on its operands and operators alone, whatever their order: the same in
every configuration, so a policy warmed up on one level meets no held-out problem of another.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle

from grpozoo.errors import UserError
from grpozoo.tasks import Task
from grpozoo.tasks.calculator import calculate, check_step, final_answer, last_integer, parse_steps
from grpozoo.tasks.hashing import digest, stable_hex, stable_int, unit
from grpozoo.tasks.scaffold import scaffolded, with_slots
from grpozoo.types import Prompt

__all__ = ["Arithmetic", "calculate", "check_step", "final_answer", "last_integer", "parse_steps", "scaffold"]

ALPHABET = "0123456789+-*()=;#"  # every character of plain prompts and completions
HELDOUT_SHARE = 1 / 8  # of all problems
SLIPS = (-20, -10, -2, -1, 1, 2, 10, 20)  # a digit off by one or two, or a lost carry
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass(frozen=True)
class Family:
    """The problems of one difficulty."""

    operators: str = "+"
    min_terms: int = 2
    terms: int = 2
    digits: int = 2
    modulus: int = 0
    parentheses: bool = False
    train: int = 20000
    heldout: int = 512


LEVELS = {
    1: Family(train=6000),  # 12+35=
    2: Family(min_terms=3, terms=3),  # 12+35+48=
    3: Family("+-", min_terms=3, terms=4),  # 12-35+48-20=
    4: Family("+-*", min_terms=3, terms=5, digits=1, parentheses=True),  # ((7+5)*3-4)*2=
    5: Family("+-*", min_terms=4, terms=6, modulus=97, parentheses=True),
    6: Family("+-*", min_terms=6, terms=9, modulus=997, parentheses=True),
}


@dataclass(frozen=True)
class Step:
    """One operation: `lhs` on the values so far, `source` the same part in the problem's own numbers."""

    left: int
    operator: str
    right: int
    value: int
    source: str

    @property
    def lhs(self) -> str:
        return f"{self.left}{self.operator}{self.right}"


class Arithmetic(Task):
    """Chains of + - * on integers."""

    @dataclass
    class Config:
        level: int = 2  # 1..6, sets every option below that is null
        operators: str | None = None  # a subset of "+-*"
        terms: int | None = None  # operands of the longest chain, at least 2
        min_terms: int | None = None  # of the shortest; null with `terms` given: the same
        digits: int | None = None  # of each operand, which does not begin with 0
        modulus: int | None = None  # every result is taken modulo this; 0: not at all
        parentheses: bool | None = None  # worked from left to right, with brackets where that needs them
        train: int | None = None  # problems; null: the level's number, or all there are
        heldout: int | None = None  # problems; likewise
        scratchpad: bool | None = None  # worked steps before the answer; null: unless chat
        chat: bool = False  # prompts are chat messages in words, for instruction-tuned models
        corrupt: float = 0.0  # share of worked solutions with a wrong result that is carried on; warm-up data only
        careless: float = 0.0  # share of worked solutions that forget every carry and borrow; warm-up data only
        slips: float = 0.0  # share of the steps of the other worked solutions that slip, carried on; warm-up data only
        padding: float = 0.0  # share of the lines of worked solutions that lead nowhere, below 1; warm-up data only
        scaffold_share: float = 0.0  # share of training prompts that ask for the steps' results too; for a warm start

        def __post_init__(self):
            _check(self)

    def __init__(self, config: Config):
        super().__init__(config)
        self.family = family(config)
        self.scratchpad = (not config.chat) if config.scratchpad is None else config.scratchpad
        train, heldout = _draw(self.family)
        for name, wanted, side in (("train", config.train, train), ("heldout", config.heldout, heldout)):
            if len(side) < (wanted or 0):
                raise UserError(
                    f"task.{name}={wanted}, but this family has {len(side)} distinct problems on that side\n"
                    f"set task.{name}={len(side)}, or widen it with task.digits, task.terms or task.operators"
                )
        self.train, self.heldout = _Problems(train, self._exercise), _Problems(heldout, self._prompt)

    def verify(self, prompt: Prompt, completion: str) -> float:
        """1.0 if the final answer is right, else 0.0; the steps do not count (`check_step` does that)."""
        return float(self.final_answer(completion) == prompt.answer)

    def final_answer(self, completion: str) -> str | None:
        """The final answer by the rules of the module docstring, or None."""
        if self.scratchpad:
            return final_answer(completion)
        if self.config.chat:
            return last_integer(completion.rpartition("#")[2])
        return final_answer(completion if "#" in completion[:1] else "#" + completion)

    def solution(self, prompt: Prompt) -> str:
        """A worked solution; for the share `corrupt` of the prompts, the same ones each time, a wrong one.

        For the share `careless` it is worked without carries and borrows: right only where there are none. In the rest each
        step slips with probability `slips`, whatever happened before.
        """
        expression = prompt.extra["expression"]
        steps = _work(*_parse(expression), self.family)
        if unit("careless", prompt.id) < self.config.careless:
            steps = _careless(expression, self.family)
        elif unit("corrupt", prompt.id) < self.config.corrupt:
            steps = _wrong(expression, steps, self.family, random.Random(stable_int("wrong", prompt.id)))
        elif self.config.slips:
            rng = random.Random(stable_int("slips", prompt.id))
            steps = _slipped(expression, self.config.slips, self.family, rng)
        if not self.scratchpad:
            return str(steps[-1].value)
        separator = "\n" if self.config.chat else ";"
        lines = with_slots([f"{step.lhs}={step.value}" for step in steps], prompt.extra.get("slots", 0))
        if self.config.padding:
            lines = _padded(lines, steps, self.config.padding, random.Random(stable_int("padding", prompt.id)))
        work = separator.join(lines)
        return f"{work}{separator if self.config.chat else ''}#{steps[-1].value}"

    def fingerprint(self) -> str:
        """Hash of the configuration and of all ids in order."""
        ids = (_id(*problem, self.family) for side in (self.train, self.heldout) for problem in side.problems)
        later = {"padding", "scaffold_share", "slips"}  # they count where they are used, so that older runs resume
        options = {name: value for name, value in asdict(self.config).items() if value or name not in later}
        return digest([json.dumps(options, sort_keys=True), *ids])

    def _exercise(self, operands: tuple[int, ...], operators: str) -> Prompt:
        """A training prompt: in the share `scaffold_share` with its sub-questions."""
        prompt = self._prompt(operands, operators)
        asks = unit("scaffold", prompt.id) < self.config.scaffold_share and prompt.extra["scaffold"]
        return scaffolded(prompt, scaffold(prompt)) if asks else prompt

    def _prompt(self, operands: tuple[int, ...], operators: str) -> Prompt:
        steps = _work(operands, operators, self.family)
        expression = _expression(operands, operators, self.family.parentheses)
        extra = {
            "expression": expression,
            "modulus": self.family.modulus,
            "values": [step.value for step in steps],
            "steps": [
                {"lhs": step.lhs, "rhs": str(step.value), "value": step.value, "source": step.source} for step in steps
            ],
            "scaffold": [(step.source, str(step.value)) for step in steps[:-1]],
        }
        question = {"messages": self._messages(expression)} if self.config.chat else {"text": f"{expression}="}
        return Prompt(_id(operands, operators, self.family), answer=str(steps[-1].value), extra=extra, **question)

    def _messages(self, expression: str) -> tuple[dict[str, str], ...]:
        words = "".join(f" {c} " if c in OPERATIONS else c for c in expression)
        what = f"({words}) mod {self.family.modulus}" if self.family.modulus else words
        how = "Answer with the number only."
        if self.scratchpad:
            how = "Write one step per line, like 12+35=47, and then a last line with # and the answer, like #47."
        return ({"role": "user", "content": f"What is {what}? {how}"},)


def scaffold(prompt: Prompt) -> list[tuple[str, str]]:
    """(sub-question, answer) of every step but the last, as in `12+35`, `47`; empty for a problem of one step."""
    return list(prompt.extra["scaffold"])


def family(config: Arithmetic.Config) -> Family:
    """The level's problems, changed by the options that are set."""
    names = ("operators", "terms", "min_terms", "digits", "modulus", "parentheses", "train", "heldout")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if "terms" in given:
        given.setdefault("min_terms", given["terms"])
    if "min_terms" in given:
        given.setdefault("terms", max(given["min_terms"], LEVELS[config.level].terms))
    return replace(LEVELS[config.level], **given)


class _Problems(Sequence):
    """Problems (operands, operators) that become prompts when asked for."""

    def __init__(self, problems, prompt):
        self.problems, self._prompt = problems, prompt

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return _Problems(self.problems[index], self._prompt)
        return self._prompt(*self.problems[index])


def _check(config: Arithmetic.Config) -> None:
    if config.level not in LEVELS:
        raise ValueError(f"level is one of {', '.join(map(str, LEVELS))}, got {config.level}")
    wanted = family(config)
    if (
        not wanted.operators
        or set(wanted.operators) - set(OPERATIONS)
        or len(set(wanted.operators)) < len(wanted.operators)
    ):
        raise ValueError(f"operators are distinct characters of '+-*', got {wanted.operators!r}")
    if not 2 <= wanted.min_terms <= wanted.terms <= 32:
        raise ValueError(f"2 <= min_terms <= terms <= 32, got min_terms={wanted.min_terms} and terms={wanted.terms}")
    for name, low, high in (("digits", 1, 6), ("train", 1, 10**7), ("heldout", 0, 10**7)):
        if not low <= getattr(wanted, name) <= high:
            raise ValueError(f"{name} lies in {low}..{high}, got {getattr(wanted, name)}")
    if wanted.modulus < 0 or wanted.modulus == 1:
        raise ValueError(f"modulus is at least 2, or 0 for none, got {wanted.modulus}")
    for name in ("corrupt", "careless", "slips", "scaffold_share"):
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"{name} lies in [0, 1], got {getattr(config, name)}")
    if not 0 <= config.padding < 1:
        raise ValueError(f"padding lies in [0, 1), got {config.padding}")
    if (config.scaffold_share or config.padding) and (config.chat or config.scratchpad is False):
        raise ValueError("scaffold_share and padding are for plain prompts with scratch-pad: drop chat and scratchpad")


def _draw(wanted: Family) -> tuple[list, list]:
    """Distinct problems for training and held-out, each chain length in turn; a smaller set is a prefix of a larger."""
    sides: tuple[list, list] = ([], [])
    sizes = (wanted.train, wanted.heldout)
    streams = {terms: _problems(terms, wanted) for terms in range(wanted.min_terms, wanted.terms + 1)}
    order = cycle(list(streams))
    while streams and (len(sides[0]) < sizes[0] or len(sides[1]) < sizes[1]):
        terms = next(order)
        problem = next(streams[terms], None) if terms in streams else None
        if problem is None:
            streams.pop(terms, None)
            continue
        side = _side(*problem)
        if len(sides[side]) < sizes[side]:
            sides[side].append(problem)
    return sides


def _problems(terms: int, wanted: Family) -> Iterator[tuple[tuple[int, ...], str]]:
    """Every chain of `terms` operands once, in an order that depends on nothing but operators, digits and `terms`."""
    low = 10 ** (wanted.digits - 1)
    operands, operators = 9 * low, wanted.operators
    size = operands**terms * len(operators) ** (terms - 1)
    for index in _permutation(size, random.Random(stable_int("arithmetic", operators, wanted.digits, terms))):
        numbers, signs = [], []
        for _ in range(terms):
            index, digit = divmod(index, operands)
            numbers.append(low + digit)
        for _ in range(terms - 1):
            index, digit = divmod(index, len(operators))
            signs.append(operators[digit])
        yield tuple(numbers), "".join(signs)


def _permutation(size: int, rng: random.Random) -> Iterator[int]:
    """0..size-1, each once, in random order, at a cost in proportion to what is taken of it."""
    seen: set[int] = set()
    bits = size.bit_length()
    while len(seen) < size // 2:
        index = rng.getrandbits(bits)
        if index < size and index not in seen:
            seen.add(index)
            yield index
    rest = [index for index in range(size) if index not in seen]
    rng.shuffle(rest)
    yield from rest


def _side(operands: tuple[int, ...], operators: str) -> int:
    """1: held out. Chains that differ only in order are on the same side: their answers may be the same."""
    return int(unit("side", sorted(operands), "".join(sorted(operators))) < HELDOUT_SHARE)


def _id(operands: tuple[int, ...], operators: str, wanted: Family) -> str:
    return stable_hex(_expression(operands, operators, wanted.parentheses), wanted.modulus)


def _expression(operands: Sequence[int], operators: str, parentheses: bool) -> str:
    text = str(operands[0])
    for index, (operator, operand) in enumerate(zip(operators, operands[1:], strict=True)):
        bracket = parentheses and index and operator == "*" and operators[index - 1] != "*"
        text = f"({text}){operator}{operand}" if bracket else f"{text}{operator}{operand}"
    return text


def _parse(expression: str) -> tuple[list[int], str]:
    """The inverse of `_expression`."""
    chain = expression.replace("(", "").replace(")", "")
    operators = "".join(c for c in chain if c in OPERATIONS)
    return [int(n) for n in "".join(" " if c in OPERATIONS else c for c in chain).split()], operators


def _work(
    operands: Sequence[int], operators: str, wanted: Family, replaced: dict[int, int] | None = None
) -> list[Step]:
    """The steps in the order they are worked; `replaced` {step: value} forces results, which are then carried on."""
    values, sources, signs, steps = list(operands), list(map(str, operands)), list(operators), []
    while signs:
        at = 0 if wanted.parentheses or "*" not in signs else signs.index("*")
        operator, left, right = signs.pop(at), values[at], values.pop(at + 1)
        value = OPERATIONS[operator](left, right)
        value = (replaced or {}).get(len(steps), value % wanted.modulus if wanted.modulus else value)
        bracket = wanted.parentheses and steps and operator == "*" and steps[-1].operator != "*"
        first = f"({sources[at]})" if bracket else sources[at]
        values[at], sources[at] = value, f"{first}{operator}{sources.pop(at + 1)}"
        steps.append(Step(left, operator, right, value, sources[at]))
    return steps


def _careless(expression: str, wanted: Family) -> list[Step]:
    """The work of one who forgets what is carried from the units to the tens, and what is borrowed for them."""
    problem, replaced = _parse(expression), {}
    for at in range(len(problem[1])):
        step = _work(*problem, wanted, replaced)[at]
        units = OPERATIONS[step.operator](step.left % 10, step.right % 10)
        plain = step.operator in "+-" and min(step.left, step.right, step.value) >= 0
        if plain and not 0 <= units <= 9:
            value = step.value - 10 if units > 9 else step.value + 10
            replaced[at] = value % wanted.modulus if wanted.modulus else value
    return _work(*problem, wanted, replaced)


def _padded(lines: list[str], steps: list[Step], share: float, rng: random.Random) -> list[str]:
    """The lines with true ones between them that lead nowhere: a copy, or a value that equals itself."""
    padded = []
    for at, line in enumerate(lines):
        padded.append(line)
        while rng.random() < share:
            step = steps[rng.randint(0, at)]
            padded.append(f"{step.lhs}={step.value}" if rng.random() < 0.5 else f"{step.value}={step.value}")
    return padded


def _wrong(expression: str, steps: list[Step], wanted: Family, rng: random.Random) -> list[Step]:
    """The same work with one plausible slip (a digit off by one or two, or a lost carry) and a wrong answer."""
    problem = _parse(expression)
    slips = [(at, slip) for at in range(len(steps)) for slip in SLIPS]
    rng.shuffle(slips)
    for at, slip in slips:
        value = _slip(steps[at], slip, wanted)
        work = None if value is None else _work(*problem, wanted, {at: value})
        if work and work[-1].value != steps[-1].value:
            return work
    raise AssertionError(f"no wrong answer to {expression}")


def _slipped(expression: str, share: float, wanted: Family, rng: random.Random) -> list[Step]:
    """The work of one who slips at each step with the same probability, and goes on from there."""
    problem, replaced = _parse(expression), {}
    for at in range(len(problem[1])):
        values = [_slip(_work(*problem, wanted, replaced)[at], slip, wanted) for slip in SLIPS]
        if rng.random() < share:
            replaced[at] = rng.choice([value for value in values if value is not None])
    return _work(*problem, wanted, replaced)


def _slip(step: Step, slip: int, wanted: Family) -> int | None:
    """The step's value off by so much; None if that changes nothing, or the sign: `7--4` never appears."""
    value = (step.value + slip) % wanted.modulus if wanted.modulus else step.value + slip
    return value if value != step.value and (value < 0) == (step.value < 0) else None
