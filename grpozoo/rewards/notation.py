"""How people write the answers of mathematical problems: finding the final one, and the same thing in fewer notations.

final(text)     what of a completion is its answer: the last <answer>, the last box; the whole text without them
plain(text)     currency, thousands, mixed numbers, powers of ten, signs and names written in one way
wording(text)   a text answer (yes, B, January 5) as the words that are compared; None: it is a formula
is_prose(text)  an answer that is neither: several words without a number
"""

import re
from decimal import Decimal
from fractions import Fraction

BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
STATED = re.compile(r"\banswer(?:\s+is)?\s*:?\s*(.+)", re.IGNORECASE)
WRITTEN = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
SYMBOLS = {
    "\u2212": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00f7": r"\div ", "\u00b1": r"\pm ",
    "\u2264": r"\le ", "\u2265": r"\ge ", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u00b0": r"^\circ ",
    "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2205": r"\emptyset ", r"\varnothing": r"\emptyset", r"\%": "%",
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\$": "", "\u20ac": "", "\u00a3": "",
}  # fmt: skip
ROOT = re.compile("\u221a" + r"\s*(\d+|[a-zA-Z]|\(([^()]*)\))")
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,;!]|\{,\}|[\u00a0\u2009\u202f])\d{3})+(?!\d)")
SPACED = re.compile(r"\s*[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?\s*")
MIXED = re.compile(r"(?<![\d./^_])(\d{1,9})\s+(\d{1,9})/(\d{1,9})(?![\d/])")
SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d{1,2})(?![\w.])")
RECURRING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\overline\s*(?:\{(\d+)\}|(\d))")
NAMED = re.compile(
    r"(?<![a-zA-Z\\])(?:(pi)(?![a-zA-Z])|((?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp)(?=\s*[(^]|\s+[\w\\]))"
)
UNIT = re.compile(r"\s*([-+]?[\d.,/]*\d)\s*([a-zA-Z]{2,}(?:[ /.*]+[a-zA-Z]+)*)(?:\^\{?-?\d\}?)?\.?\s*")
WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}(?![a-zA-Z])")
# fmt: off
MATHS = frozenset({  # names that stand in formulas
    "pi", "sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log",
    "ln", "exp", "lim", "min", "max", "mod", "gcd", "lcm", "det", "inf", "infty", "infinity", "oo", "and", "or", "to",
    "choose",
})
# fmt: on


def final(text: str) -> str:
    """The last closed <answer>, in it the last closed box, or the text. The box's content comes without the box."""
    if tagged := TAGGED.findall(text):
        text = tagged[-1]
    boxes = [content for match in BOX.finditer(text) if (content := _braced(text, match.end())) is not None]
    return boxes[-1] if boxes else text


def in_box(text: str) -> bool:
    """Whether `final` finds a box."""
    return BOX.search(text) is not None and final(text) is not text


def plain(text: str) -> str:
    """The same mathematics in the notations that math-verify reads."""
    for symbol, name in SYMBOLS.items():
        text = text.replace(symbol, name)
    text = ROOT.sub(lambda match: rf"\sqrt{{{match[2] or match[1]}}}", text)
    text = GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    if SPACED.fullmatch(text):
        text = text.replace(" ", "")
    text = RECURRING.sub(_recurring, text)
    text = MIXED.sub(_mixed, text)
    text = SCIENTIFIC.sub(lambda match: format(Decimal(f"{match[1]}e{match[2]}"), "f"), text)
    return NAMED.sub(lambda match: rf"\{match[0]} ", text)


def without_unit(answer: str) -> str:
    """5 apples -> 5; what is no number with a unit stays as it is."""
    unit = UNIT.fullmatch(WRITTEN.sub(r" \1", answer))
    return unit[1] if unit and not MATHS & set(unit[2].lower().split()) else answer


def wording(answer: str) -> str | None:
    """The words of a text answer: one word, or several in \\text{...}, or with a number between them; else None."""
    words = _words(answer)
    marked = WRITTEN.fullmatch(answer.strip().strip("$"))
    several = len(WORD.findall(words)) > 0 and bool(re.search(r"\d", words))
    if re.fullmatch(r"[^\W\d_]+(?:[-'][^\W\d_]+)*", words):
        return None if words in MATHS else words
    return words if _named(answer) and (marked or several) else None


def is_formula(text: str) -> bool:
    """Whether a text is a formula without the marks around it: LaTeX, and no words."""
    return "\\" in text and "\n" not in text.strip() and not _named(text) and not re.search(r"\$|\\[(\[]|\\boxed", text)


def is_prose(answer: str) -> bool:
    """Whether an answer is a sentence: words that are no formula's, and nothing to compute."""
    return wording(answer) is None and _named(answer) and not re.search(r"[\d=<>^_\\]", answer)


def equal(answer: str, text: str) -> bool:
    """Whether the completion's answer is written like the other one, sign by sign."""
    return bool(answer.strip()) and final(text).strip() == final(answer).strip()


def says(text: str, words: str) -> bool:
    """Whether the completion's answer are these words, case and punctuation apart."""
    answer = final(text)
    stated = STATED.findall(answer)
    said = _words(stated[-1] if stated and answer is text else answer)
    return said == words or (answer is text and bool(stated) and re.split(r"[\s,;.:)]", said.lstrip("("))[0] == words)


def _named(answer: str) -> list[str]:
    """The words that are no names of mathematics."""
    bare = re.sub(r"\\[a-zA-Z]+", " ", WRITTEN.sub(r" \1 ", answer))
    return [word for word in WORD.findall(bare) if word.lower() not in MATHS]


def _words(text: str) -> str:
    text = WRITTEN.sub(r" \1 ", text).replace("**", "").replace("$", " ").replace("\\ ", " ")
    text = " ".join(text.split()).strip(" .,;:!'\"").lower()
    return text[1:-1].strip() if re.fullmatch(r"\([^()]*\)", text) else text


def _braced(text: str, start: int) -> str | None:
    """The text up to the brace that closes the one before `start`; None: it is cut off."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : match.start()]
    return None


def _mixed(match: re.Match) -> str:
    whole, over, under = map(int, match.groups())
    return f"{whole * under + over}/{under}"


def _recurring(match: re.Match) -> str:
    """0.1\\overline{6} -> 1/6."""
    whole, head, tail = match[1], match[2], match[3] or match[4]
    value = Fraction(
        int((whole or "0") + head + tail) - int((whole or "0") + head), 10 ** len(head) * (10 ** len(tail) - 1)
    )
    return f"{value.numerator}/{value.denominator}"
