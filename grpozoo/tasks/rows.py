"""Rows with named columns -> prompts: what `jsonl` and `hf` have in common.

A row is a mapping from column to value. Its prompt is a string or a list of {"role", "content"} messages. A closing
assistant turn is a worked answer and no part of the prompt (said when the run starts), or with `prefill=continue` the
beginning of the completion that the policy goes on with. Columns that have no role here go to `Prompt.extra` as they
are, where rewards find them by name.

Ids are hashes of the rows, so they survive reordering and added rows; of equal rows each has its own. Rows with equal
prompts, before any system message or suffix, are on the same side of the split.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from grpozoo.errors import UserError, nearest
from grpozoo.tasks import Task
from grpozoo.tasks.hashing import digest, stable_hex, unit
from grpozoo.types import Prompt

Messages = tuple[dict[str, str], ...]
ROLES = ("system", "user", "assistant", "tool", "developer")
NAMES = {  # role of a column -> names that are tried when the option is null
    "messages": ("messages", "conversation"),
    "prompt": ("prompt", "question", "problem"),
    "answer": ("answer",),
    "system": ("system",),
    "solution": ("solution",),
}
Prefill = Enum("Prefill", ["drop", "continue"])
PLACES = ("path", "heldout_path")  # where data lies does not change what they are


class RowTask(Task):
    """A task whose prompts are rows of a table. Its own verifier only compares texts, so the chosen rewards decide."""

    decides = False

    @dataclass
    class Config:
        prompt: str | None = None  # column, text or messages; null: prompt, question or problem
        messages: str | None = None  # column, instead of prompt; null: messages or conversation, if there is one
        answer: str | None = None  # column; null: answer, if there is one; without an answer `verify` has no opinion
        solution: str | None = None  # column of worked completions for the warm start; null: solution, if there is one
        system: str | None = None  # column of system messages; null: system, if there is one
        system_prompt: str | None = None  # one system message for every row without its own
        suffix: str = ""  # appended to the prompt, such as an instruction on the format
        prefill: Prefill = Prefill.drop  # a closing assistant turn: drop (a worked answer) | continue (go on with it)
        chat: bool = False  # text prompts become a user message; so they do whenever there is a system message
        answer_after: str | None = None  # the answer follows the last of these marks, in the column too if it is there
        answer_before: str | None = None  # and stands before this one

    def verify(self, prompt: Prompt, completion: str) -> float | None:
        """1.0 if the answer equals that of the row, blanks around it apart, else 0.0; None if the row has none."""
        if prompt.answer is None:
            return None
        return float(self.final_answer(completion) == prompt.answer)

    def final_answer(self, completion: str) -> str | None:
        """The text between the markers, stripped; None: the marker is missing."""
        return extract(completion, self.config.answer_after, self.config.answer_before)

    def solution(self, prompt: Prompt) -> str | None:
        """The row's worked completion, if it has one."""
        return prompt.extra.get("solution")

    def read(
        self, columns: "Columns", rows: Iterable[Mapping[str, Any]], places: Sequence[str] | None = None
    ) -> list["Row"]:
        """All rows in order; equal ones are numbered. What is odd about them is said when the run starts.

        places: how errors name each row; None: by its number.
        """
        seen: Counter[str] = Counter()
        result = []
        for number, row in enumerate(rows, start=1):
            where = places[number - 1] if places else f"{columns.where}, row {number}"
            try:
                key = content(row)
            except RecursionError:
                raise UserError(f"{where}: its values are nested too deeply") from None
            result.append(columns.read(row, seen[key], where))
            seen[key] += 1
        self.notices = [*self.notices, *columns.notices()]
        return result

    def fingerprint(self) -> str:
        """Hash of the rows and of the options that shape prompts and answers; not of where the data lies."""
        options = {name: value for name, value in asdict(self.config).items() if name not in PLACES}
        if options.pop("prefill") is not Prefill.drop:  # the others hash as they did before there was a choice
            options["prefill"] = self.config.prefill.name
        return digest([json.dumps(options, sort_keys=True), *self._fingerprint_ids()])

    def _fingerprint_ids(self) -> Iterator[str]:
        for side in (self.train, self.heldout):
            yield from (prompt.id for prompt in side)
            yield ""


@dataclass(frozen=True)
class Row:
    """A prompt with what decides about its side."""

    prompt: Prompt
    share: float  # in [0, 1), the same for equal questions


def extract(text: str, after: str | None, before: str | None) -> str | None:
    """What stands between the last `after` and the next `before`, blanks around it removed.

    A mark that is None does not bound; None if a mark is missing.
    """
    if after is not None:
        _, found, text = text.rpartition(after)
        if not found:
            return None
    if before is not None:
        text, found, _ = text.partition(before)
        if not found:
            return None
    return text.strip()


class Columns:
    """The columns of a table by role, found by the options or by their usual names."""

    def __init__(self, config: RowTask.Config, columns: Iterable[str], where: str):
        self.config, self.where, self.present = config, where, list(columns)
        if config.prompt and config.messages:
            raise UserError("task.prompt and task.messages both name the prompt: drop one")
        asked = "messages" if config.messages else "prompt" if config.prompt else None
        found = self._find(asked) if asked else self._find("messages") or self._find("prompt")
        if found is None:
            raise UserError(
                f"{where}: no column for the prompt (tried {', '.join(NAMES['messages'] + NAMES['prompt'])})\n"
                f"columns: {_listed(self.present)}; name yours with task.prompt=COLUMN"
            )
        self.question: str = found
        self.answer, self.solution, self.system = (self._find(role) for role in ("answer", "solution", "system"))
        self._used = {self.question, self.answer, self.solution, self.system}
        self.rows = 0  # read so far
        self.dropped = 0  # closing assistant turns in them
        self.unanswered: list[int] = []  # numbers of the rows whose answer is empty, in the column that has answers

    def notices(self) -> list[str]:
        """What to say about the rows read so far."""
        said = []
        if self.unanswered:
            first = ", ".join(map(str, self.unanswered[:5])) + ", ..." * (len(self.unanswered) > 5)
            said.append(
                f"{self.where}: column {self.answer!r} is empty in {len(self.unanswered)} of {self.rows} rows (row {first}): "
                "their completions have nothing to be compared with"
            )
        if self.dropped:
            said.append(
                f"{self.where}: {self.dropped} of {self.rows} rows end in an assistant turn, which is taken for a worked "
                "answer and no part of the prompt\n"
                "where it is the beginning of the completion (a prefilled <think>): task.prefill=continue"
            )
        return said

    def _find(self, role: str) -> str | None:
        asked = getattr(self.config, role)
        if asked is None:
            return next((name for name in NAMES[role] if name in self.present), None)
        if asked not in self.present:
            raise UserError(
                f"task.{role}={asked}: {self.where} has no column {asked!r}{nearest(asked, self.present)}\n"
                f"columns: {_listed(self.present)}"
            )
        return asked

    def read(self, row: Mapping[str, Any], occurrence: int, where: str) -> Row:
        """One row; `occurrence` tells equal rows apart, `where` names it in errors."""
        self.rows += 1
        question = row.get(self.question)
        messages, solution = self._messages(question, where)
        if self.solution and row.get(self.solution) is not None:
            solution = str(row[self.solution])
        extra = {name: value for name, value in row.items() if name not in self._used}
        if solution is not None:
            extra["solution"] = solution
        text, messages = self._dress(question, messages, row.get(self.system) if self.system else None)
        answer = self._answer(row)
        if self.answer and answer is None:
            self.unanswered.append(self.rows)
        prompt = Prompt(stable_hex(content(row), occurrence), text, messages, answer, extra)
        return Row(prompt, unit("side", content(question)))

    def _dress(
        self, question: Any, messages: Messages | None, system: str | None
    ) -> tuple[str | None, Messages | None]:
        """(text, None) or (None, messages) with system message and suffix."""
        system = system or self.config.system_prompt
        if messages is None:
            if not system and not self.config.chat:
                return question + self.config.suffix, None
            messages = ({"role": "user", "content": question},)
        if system and messages[0]["role"] not in ("system", "developer"):
            messages = ({"role": "system", "content": str(system)}, *messages)
        at = len(messages) - 1 - (messages[-1]["role"] == "assistant")  # a prefilled turn stands behind the suffix
        asked = {**messages[at], "content": messages[at]["content"] + self.config.suffix}
        return None, (*messages[:at], asked, *messages[at + 1 :])

    def _answer(self, row: Mapping[str, Any]) -> str | None:
        value = row.get(self.answer) if self.answer else None
        text = "" if value is None or value != value else str(value).strip()  # NaN is how tables write a missing number
        marked = extract(text, self.config.answer_after, self.config.answer_before)
        return (text if marked is None else marked) or None  # an empty answer would reward silence

    def _messages(self, question: Any, where: str) -> tuple[Messages | None, str | None]:
        """(messages or None for plain text, content of a closing assistant turn or None)."""
        if isinstance(question, str) and question.strip():
            self._check_text(question, where)
            return None, None
        if not isinstance(question, (list, tuple)) or not question:
            empty = question is None or question == [] or (isinstance(question, str) and not question.strip())
            shown = "is empty" if empty else f"holds {type(question).__name__}, not text or a list of messages"
            raise UserError(f"{where}: column {self.question!r} {shown}")
        messages = tuple(question)
        for message in messages:
            if (
                not isinstance(message, Mapping)
                or message.get("role") not in ROLES
                or not isinstance(message.get("content"), str)
            ):
                raise UserError(
                    f"{where}: a message is {{role, content}}, text content and a role among {', '.join(ROLES)}\n"
                    f"got {str(message)[:100]}"
                )
            self._check_text(message["content"], where)
        messages = tuple({"role": m["role"], "content": m["content"]} for m in messages)
        last = messages[-1]
        if last["role"] != "assistant":
            return messages, None
        if len(messages) == 1:
            raise UserError(f"{where}: the only message is the assistant's: there is no prompt")
        if self.config.prefill is not Prefill.drop:
            return messages, None
        self.dropped += 1
        return messages[:-1], last["content"]

    def _check_text(self, text: str, where: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{where}: column {self.question!r} holds half of a surrogate pair, which is no text"
            ) from None


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(str(name)[:60] for name in names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"


def content(value: Any) -> str:
    """A value as text in which equal values look equal, whatever the order of keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def split(rows: list[Row], heldout: float) -> tuple[list[Prompt], list[Prompt]]:
    """(train, heldout) in the order of the rows.

    heldout < 1: the questions whose hash lies in that share. heldout >= 1: the questions with the lowest hashes, as
    many as fit into that number of rows.
    """
    if heldout < 1:
        chosen = {row.share for row in rows if row.share < heldout}
    else:
        chosen, room = set(), int(heldout)
        for share, count in sorted(Counter(row.share for row in rows).items()):
            if count > room:
                break
            chosen.add(share)
            room -= count
    train = [row.prompt for row in rows if row.share not in chosen]
    return train, [row.prompt for row in rows if row.share in chosen]


def without(rows: list[Row], heldout: list[Row]) -> list[Prompt]:
    """The prompts of the rows whose question is not held out."""
    shares = {row.share for row in heldout}
    return [row.prompt for row in rows if row.share not in shares]


def check_heldout(heldout: float) -> None:
    """A share in [0, 1) or a whole number of rows."""
    if heldout < 0 or (heldout >= 1 and heldout != int(heldout)):
        raise ValueError(f"heldout is a share below 1 or a whole number of rows, got {heldout}")


def check_marks(*marks: str | None) -> None:
    """A mark is a text of at least one character, or null."""
    if "" in marks:
        raise ValueError("answer_after and answer_before are texts of at least one character, or null")
