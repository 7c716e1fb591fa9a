r"""Prompts that ask for sub-answers on the way to the answer: how they are written, and how the sub-answers are read back.

    chain    [(question_1, answer_1), .., (question_m, answer_m)]      the answers are for the verifier's eyes only

A plain prompt keeps its text, with the sub-questions before it and a slot for each in the completion; the main answer
stays in the task's own form:

    prompt   S1:7+5;S2:(7+5)*3;(7+5)*3-4=            completion   S1:7+5=12;S2:12*3=36;36-4=32#32

A chat asks for `[SUB-1 ANSWER] \boxed{12}` and so on, and for `[MAIN ANSWER] \boxed{32}`. A sub-answer is what follows
the last occurrence of its label, before the next one: in a slot the text after the last `=`, in a chat the first box.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpozoo.errors import UserError
from grpozoo.types import Prompt

Chain = list[tuple[str, str]]
SUFFIX = "/scaffold"  # of the id of a prompt with sub-questions
_SLOT_ENDS = re.compile(r"S[0-9]+:|[;\n#]")
_LABEL = re.compile(r"\[(?:SUB-[0-9]+|MAIN) ANSWER\]")
_INTEGER = re.compile(r"[+-]?[0-9]+")


def read_chain(prompt: Prompt, column: str = "scaffold") -> Chain:
    """The prompt's sub-questions with their answers, from `extra[column]`; empty if it has none.

    A list of pairs, or of {question, answer}; or such a list as JSON text.
    """
    found: Any = prompt.extra.get(column)
    try:
        steps = json.loads(found if found.strip() else "[]") if isinstance(found, str) else found or []
        pairs = [(step["question"], step["answer"]) if isinstance(step, dict) else step for step in steps]
        return [(str(question), str(answer)) for question, answer in pairs]
    except (ValueError, TypeError, KeyError):
        raise UserError(
            f"prompt {prompt.id!r}: {column!r} is no list of sub-questions: {str(found)[:80]!r}\n"
            'it holds pairs [question, answer], or {"question": ..., "answer": ...}, or such a list as JSON text'
        ) from None


def scaffolded(prompt: Prompt, chain: Chain) -> Prompt:
    """The prompt with its sub-questions. Nothing of their answers enters its text or messages."""
    questions = [question for question, _ in chain]
    extra = {**prompt.extra, "slots": len(chain)}
    if prompt.messages is None:
        slots = "".join(f"S{number}:{question};" for number, question in enumerate(questions, start=1))
        return replace(prompt, id=prompt.id + SUFFIX, text=slots + (prompt.text or ""), extra=extra)
    if modulus := prompt.extra.get("modulus"):  # of the arithmetic task, whose questions are parts of its expression
        questions = [f"({question}) mod {modulus}" for question in questions]
    *before, last = prompt.messages
    asked = {**last, "content": last["content"] + _request(questions)}
    return replace(prompt, id=prompt.id + SUFFIX, messages=(*before, asked), extra=extra)


def asks(prompt: Prompt) -> bool:
    """Whether the prompt has its sub-questions already."""
    return prompt.id.endswith(SUFFIX)


def correct_steps(prompt: Prompt, chain: Chain, completion: str) -> list[bool]:
    """Whether each sub-answer is right; a missing or malformed one is wrong. `prompt`: with or without sub-questions."""
    read = _slot if prompt.messages is None else _boxed
    answers = [read(completion, number) for number in range(1, len(chain) + 1)]
    return [found is not None and same(found, right) for found, (_, right) in zip(answers, chain, strict=True)]


def main_answer(prompt: Prompt, completion: str) -> str | None:
    """The box behind `[MAIN ANSWER]`, or else the last box of the final 1000 characters; None in plain text."""
    if prompt.messages is None:
        return None
    labelled = _labelled(completion, "[MAIN ANSWER]")
    found = None if labelled is None else next(_boxes(labelled), None)
    return found if found is not None else next(reversed([None, *_boxes(completion[-1000:])]))


def with_slots(lines: Sequence[str], count: int) -> list[str]:
    """Worked lines with the labels of a plain prompt in front of the first `count`."""
    return [f"S{number}:{line}" if number <= count else line for number, line in enumerate(lines, start=1)]


def same(one: str, other: str) -> bool:
    """Equality of answers after normalisation: blanks, case, dollar signs, a full stop, and the spelling of integers."""
    return bool(normalised(one)) and normalised(one) == normalised(other)


def normalised(answer: str) -> str:
    """An answer without what does not change its meaning."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", answer)
    text = re.sub(r"\\left|\\right|\\[,;! ]|[$\s]", "", text).rstrip(".").lower()
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)
    return str(int(text)) if _INTEGER.fullmatch(text) and len(text) < 1000 else text


def _request(questions: Sequence[str]) -> str:
    asked = "\n".join(f"{number}. {question}" for number, question in enumerate(questions, start=1))
    return (
        f"\n\nWork through these questions first, in this order:\n{asked}\n"
        "When you have answered question number i, write its label and the answer in a box: [SUB-i ANSWER] \\boxed{...}\n"
        "Write the answer to the whole problem last: [MAIN ANSWER] \\boxed{...}\n"
        "This replaces other instructions on the form of the answer."
    )


def _slot(completion: str, number: int) -> str | None:
    _, found, rest = completion.rpartition(f"S{number}:")
    return _SLOT_ENDS.split(rest, maxsplit=1)[0].rpartition("=")[2] if found else None


def _boxed(completion: str, number: int) -> str | None:
    labelled = _labelled(completion, f"[SUB-{number} ANSWER]")
    return None if labelled is None else next(_boxes(labelled), None)


def _labelled(completion: str, label: str) -> str | None:
    """What stands between the last occurrence of a label and the next label."""
    _, found, rest = completion.rpartition(label)
    return _LABEL.split(rest, maxsplit=1)[0] if found else None


def _boxes(text: str):
    r"""The contents of each complete \boxed{...}, in order; braces inside are matched."""
    for match in re.finditer(r"\\boxed\s*\{", text):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if not depth:
                yield text[match.end() : end]
                break
