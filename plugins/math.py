"""Mathematical equivalence of the completion's answer and the prompt's, by the package math-verify.

    r_i = 1[ the expression found in text_i equals the one in answer_i ]           0 where the text has no expression

The last closed <answer> or box is the completion's answer (grpozoo.rewards.notation); answers of words are compared as
words. The comparison runs in one child process that lives as long as the run. A watchdog thread inside the child ends it
when a row takes longer than `seconds`, even in the middle of a huge power, and the next row gets a new child. No
signal is involved, so it works from any thread. A row that was too slow, or on which math-verify raised an error,
gets no answer (it leaves its group) and counts in `math/failures`. So does a prompt whose answer cannot be read or is
prose; a prompt without answer has nothing to compare with and gets none either.
"""

import faulthandler
import json
import logging
import os
import subprocess
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

from grpozoo import Plugin, UserError, hookimpl
from grpozoo.rewards.notation import equal, final, in_box, is_formula, is_prose, plain, says, without_unit, wording


class Math(Plugin):
    """`reward=math`; needs `pip install "grpozoo[math]"`."""

    metrics = {"failures": "share of completions, 0 to 1: too slow or an error in math-verify, no answer"}

    @dataclass
    class Config:
        seconds: float = 3.0  # time limit per completion
        weight: float = 1.0  # in the total

        def __post_init__(self):
            if not self.seconds > 0:
                raise ValueError(f"seconds is positive, got {self.seconds}")

    def __init__(self, config):
        super().__init__(config)
        if find_spec("math_verify") is None:
            raise UserError('plugins.math needs the package math-verify: pip install "grpozoo[math]"')
        self.worker = Worker(config.seconds)
        self.answered = False  # a prompt had an answer to compare with

    @hookimpl
    def reward(self, rollouts):
        pairs = [(prompt.answer, text) for prompt, text in zip(rollouts.prompts, rollouts.text, strict=True)]
        self.answered = self.answered or any(answer is not None for answer, _ in pairs)
        if pairs and not self.answered:
            raise UserError(
                f"plugins.{self.name}: no prompt has an answer to compare with; try reward=answer or reward=function"
            )
        answers = [None if answer is None else self.worker.ask(answer, text) for answer, text in pairs]
        failures = sum(
            answer is not None and verdict is None for (answer, _), verdict in zip(pairs, answers, strict=True)
        )
        self.log("failures", failures / max(len(pairs), 1), len(pairs))
        return {self.name: answers}

    def state_dict(self):
        return {"answered": self.answered}

    def load_state_dict(self, state):
        self.answered = state.get("answered", False)


class Worker:
    """The parent's end: starts the child when it is first needed, and again after each one that died."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.process = None

    def ask(self, answer: str, text: str) -> float | None:
        """1.0 or 0.0; None if the child raised an error or ran out of time."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        try:
            self.process.stdin.write(json.dumps([answer, text]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):  # it is dead
            self.stop()
            return None
        return json.loads(line)

    def start(self) -> None:
        # As a file, so that no name has to be importable; with -P, because this folder's math.py would hide Python's.
        command = [sys.executable, "-P", "-W", "ignore", os.path.abspath(__file__), str(self.seconds)]
        path = os.pathsep.join(folder for folder in sys.path if folder)
        # A session of its own: Ctrl-C is for the parent, which saves the run and may need one more verdict.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.stop = weakref.finalize(self, _end, self.process)  # also at exit
        greeting = self.process.stdout.readline().strip()
        if greeting != "ready":
            self.stop()
            raise UserError(f"plugins.math: the worker process does not start: {greeting or 'it ended without a word'}")


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):  # what was written and never read
            pipe.close()


def serve(seconds: float) -> None:
    """The child: one JSON line [answer, text] in, one line 1.0, 0.0 or null out, until the parent is gone."""
    answers, nowhere = os.fdopen(os.dup(1), "w"), open(os.devnull, "w")  # noqa: SIM115, open to the end
    os.dup2(nowhere.fileno(), 1)  # what libraries print is no verdict
    logging.disable()
    try:
        import math_verify  # noqa: F401
    except Exception as error:
        print(repr(error), file=answers, flush=True)
        return
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)  # a thread without Python's lock
        verdict = judge(*json.loads(line))
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(verdict), file=answers, flush=True)


def judge(answer: str, text: str) -> float | None:
    """Equal words or, by math-verify, equal mathematics; None where it fails or the answer is prose."""
    from math_verify import verify

    if is_prose(answer):
        return None
    words = wording(without_unit(answer))
    if equal(answer, text) or (words is not None and says(text, words)):
        return 1.0
    if words is not None and words.isalpha() and len(words) > 2:  # x and ab may be variables
        return 0.0
    try:
        expected = read_answer(answer)
        return (
            float(verify(expected, read_final(text), timeout_seconds=None, raise_on_error=True)) if expected else None
        )
    except Exception:
        return None


@lru_cache(maxsize=1024)
def read_answer(answer: str) -> list:
    """Answers of data sets are often bare LaTeX, which math-verify reads only between dollar signs."""
    bare = plain(without_unit(final(answer)))
    return (read(f"${bare}$") if "$" not in bare else []) or read(bare)


def read_final(text: str) -> list:
    """The final answer of a completion: of several boxes the last one counts."""
    if in_box(text):
        return read_answer.__wrapped__(text)  # each is asked for once
    answer = plain(final(text))
    return read(f"${answer}$" if is_formula(answer) else answer)


def read(text: str) -> list:
    from math_verify import parse

    return parse(text, parsing_timeout=None, raise_on_error=True)  # None: no time limit by signal


if __name__ == "__main__":
    serve(float(sys.argv[1]))
