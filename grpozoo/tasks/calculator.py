"""Pure functions on worked arithmetic: a calculator, and the parts of a completion such as `12+35=47;47+48=95#95`."""

import re

MAX_CHARACTERS = 256  # of an expression: bounds the size of the result and the time
MAX_DEPTH = 32  # of brackets
_TOKEN = re.compile(r"\s*([0-9]+|[-+*()])")
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_NUMBER = re.compile(r"(?<![\w.,)])-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?![0-9])(?:\.[0-9]+)?|[0-9]+")


def calculate(expression: str, modulus: int = 0) -> int:
    """The value of an integer expression with + - * and brackets, in [0, modulus) if there is one.

    Raises ValueError for anything else, for more than 256 characters and for more than 32 nested brackets.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {MAX_CHARACTERS} characters, got {len(expression)}")
    value, rest = _sum(_tokens(expression), 0)
    if rest:
        raise ValueError(f"unexpected {rest[-1]!r} in {expression!r}")
    return value % modulus if modulus else value


def parse_steps(completion: str) -> list[tuple[str, str]]:
    """The (lhs, rhs) of each step before the `#`; steps end with `;` or a line end.

    A step that is not `lhs=rhs` comes back as (step, ""), so positions stay meaningful; blank ones are dropped.
    """
    work = completion.partition("#")[0]
    steps = (step.strip() for step in re.split(r"[;\n]", work))
    return [_sides(step) for step in steps if step]


def check_step(lhs: str, rhs: str, modulus: int = 0) -> bool:
    """Whether a step is right on its own: rhs is the value of lhs, written without leading zeros."""
    if not _INTEGER.fullmatch(rhs.strip()):
        return False
    try:
        return str(calculate(lhs, modulus)) == rhs.strip()
    except ValueError:
        return False


def final_answer(completion: str) -> str | None:
    """What follows the one `#`, blanks around it removed; None unless that is an integer and nothing else.

    Leading zeros, a plus sign, `-0`, a second `#` and anything after the number are not an answer: there is exactly
    one right way to write it.
    """
    answer = completion.partition("#")[2].strip()
    return answer if _INTEGER.fullmatch(answer) else None


def last_integer(text: str) -> str | None:
    """The last number of free text, without thousands separators and leading zeros; None if it is not an integer."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    whole, _, fraction = found[-1].replace(",", "").partition(".")
    sign, digits = "-" * whole.startswith("-"), whole.lstrip("-").lstrip("0") or "0"
    if fraction.strip("0"):
        return None
    return "0" if digits == "0" else sign + digits


def _sides(step: str) -> tuple[str, str]:
    lhs, _, rhs = step.partition("=")
    return (step, "") if step.count("=") != 1 else (lhs.strip(), rhs.strip())


def _tokens(expression: str) -> list[str]:
    """The tokens in reverse, so that the parser can pop the next one."""
    tokens, position = [], 0
    text = expression.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if not match:
            raise ValueError(f"{text[position]!r} does not belong in an expression: {expression!r}")
        tokens.append(match[1])
        position = match.end()
    return tokens[::-1]


def _sum(tokens: list[str], depth: int) -> tuple[int, list[str]]:
    value = _product(tokens, depth)
    while tokens and tokens[-1] in "+-":
        value += _product(tokens, depth) if tokens.pop() == "+" else -_product(tokens, depth)
    return value, tokens


def _product(tokens: list[str], depth: int) -> int:
    value = _atom(tokens, depth)
    while tokens and tokens[-1] == "*":
        tokens.pop()
        value *= _atom(tokens, depth)
    return value


def _atom(tokens: list[str], depth: int) -> int:
    sign = 1
    while tokens and tokens[-1] == "-":
        tokens.pop()
        sign = -sign
    token = tokens.pop() if tokens else "the end"
    if token.isdigit():
        return sign * int(token)
    if token != "(" or depth >= MAX_DEPTH:
        raise ValueError(f"expected a number, found {token}" if token != "(" else f"more than {MAX_DEPTH} brackets")
    value, _ = _sum(tokens, depth + 1)
    if not tokens or tokens.pop() != ")":
        raise ValueError("a bracket is not closed")
    return sign * value
