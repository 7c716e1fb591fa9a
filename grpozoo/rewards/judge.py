"""Judges: what each step of a completion is worth, as one label per step. They never decide whether an answer is right.

    useful       advances the solution                  mechanical   rewrites or computes without new information
    redundant    repeats earlier content                reversion    goes back, undoes, takes a detour
    error        locally wrong or misleading

`Judge.labels` is what a method calls: it asks for each text once, remembers answers by a hash of prompt and completion,
retries a failure once and then gives None for it. A failure is never an opinion, and is not remembered.
"""

import hashlib
import json
import os
import re
import urllib.request
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from grpozoo.tasks.calculator import check_step, parse_steps
from grpozoo.types import Prompt

LABELS = ("useful", "mechanical", "redundant", "reversion", "error")
REMEMBERED = 100_000  # answers kept, the newest


class Judge:
    """Subclass and define `label`; `workers` calls of it run at a time."""

    def __init__(self, workers: int = 1):
        self.workers = workers
        self.trouble = ""  # what the last failure said
        self._known: dict[str, list[str]] = {}

    @abstractmethod
    def label(self, prompt: Prompt, completion: str) -> list[str]:
        """One of LABELS for each step of the completion, in order; raises where there is no answer."""

    def labels(self, pairs: Sequence[tuple[Prompt, str]]) -> list[list[str] | None]:
        """The labels of each completion; None: the judge failed twice, or found no step."""
        keys = [_hash(asked(prompt), completion) for prompt, completion in pairs]
        new = {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in self._known}
        found = {key: self._known[key] for key in keys if key in self._known}
        with ThreadPoolExecutor(max(1, min(self.workers, len(new)))) as pool:
            answers = pool.map(lambda pair: self._try(*pair), new.values())
            fresh = {key: answer for key, answer in zip(new, answers, strict=True) if answer}
        self._known |= fresh
        for key in list(self._known)[: max(len(self._known) - REMEMBERED, 0)]:
            del self._known[key]
        return [(found | fresh).get(key) for key in keys]

    def _try(self, prompt: Prompt, completion: str) -> list[str] | None:
        for _ in range(2):
            try:
                labels = self.label(prompt, completion)
            except Exception as error:  # whatever a service or its answer can do wrong
                self.trouble = f"{type(error).__name__}: {error}"
                continue
            if labels and set(labels) <= set(LABELS):
                return list(labels)
            self.trouble = f"labels are {', '.join(LABELS)}, got {labels!r:.80}" if labels else "no step was found"
        return None


class RuleJudge(Judge):
    """For problems of the arithmetic task (`extra` holds expression and modulus). A step is a line `lhs=rhs`, or `S1:lhs=rhs`.

    In this order: error, if the equation is false; redundant, if it stood there before (and its numbers are used up:
    2+3+2+3 has equal steps that are both needed); reversion, if it takes up a value that was computed and used already,
    or says that it goes back; mechanical, if it repeats a value without an operation on what is still to be used, or is
    no equation; useful otherwise.
    """

    def label(self, prompt: Prompt, completion: str) -> list[str]:
        """The labels of the lines before the answer."""
        if "expression" not in prompt.extra:
            raise ValueError("the rules are those of task=arithmetic; other prompts need judge=endpoint")
        expression, modulus = prompt.extra["expression"], prompt.extra.get("modulus", 0)
        work = _Work(Counter(map(int, re.findall(r"[0-9]+", expression))), modulus)
        return [work.label(_SLOT.sub("", lhs), rhs) for lhs, rhs in parse_steps(completion)]


_UNDO = re.compile(r"\b(?:wait|undo|scratch that|start over|go back)\b", re.IGNORECASE)
_SLOT = re.compile(r"^S[0-9]+:")
_BINARY = re.compile(r"\s*(-?[0-9]+)\s*[-+*]\s*(-?[0-9]+)\s*")
_ALONE = re.compile(r"\s*-?[0-9]+\s*")


class _Work:
    """The numbers that a solution may still use, while its lines are read."""

    def __init__(self, operands: Counter, modulus: int):
        self.unused, self.modulus = operands, modulus  # operands of the problem and results so far, each used once
        self.results: set[int] = set()  # every value computed so far
        self.lines: set[tuple[str, str]] = set()

    def label(self, lhs: str, rhs: str) -> str:
        back = bool(_UNDO.search(lhs) or _UNDO.search(rhs))
        lhs, rhs = (_UNDO.sub("", side).strip(" ,.:!") for side in (lhs, rhs))
        line = "".join(lhs.split()), "".join(rhs.split())
        if not rhs and not re.search(r"[0-9=]", lhs):  # words
            return "reversion" if back else "mechanical"
        right, seen = check_step(lhs, rhs, self.modulus), line in self.lines
        self.lines.add(line)
        numbers = Counter(self._numbers(lhs))
        spent, missing = numbers & self.unused, numbers - self.unused
        if right and seen and (missing or numbers.total() < 2):
            return "redundant"
        back = back or any(number in self.results for number in missing)
        self.unused -= spent
        if spent and re.fullmatch(r"-?[0-9]+", rhs):
            self.unused[int(rhs)] += 1
            self.results.add(int(rhs))
        if not right:
            return "error"
        if back:
            return "reversion"
        return "mechanical" if spent.total() < 2 and int(rhs) in numbers else "useful"

    def _numbers(self, lhs: str) -> list[int]:
        if found := _BINARY.fullmatch(lhs):
            return [int(found[1]), int(found[2])]
        return [int(lhs)] if _ALONE.fullmatch(lhs) else [int(number) for number in re.findall(r"[0-9]+", lhs)]


class EndpointJudge(Judge):
    """A chat model behind an OpenAI-compatible endpoint. `$GRPOZOO_JUDGE_KEY`, if set, is sent as its bearer token."""

    def __init__(self, url: str, model: str, timeout: float = 60.0, workers: int = 8):
        super().__init__(workers)
        _check_url(url)
        self.url = url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        self.model, self.timeout = model, timeout

    def label(self, prompt: Prompt, completion: str) -> list[str]:
        """What the model says, greedily."""
        content = f"{INSTRUCTION}\n\nPROBLEM:\n{asked(prompt)}\n\nSOLUTION:\n{completion}"
        body = {"model": self.model, "temperature": 0, "messages": [{"role": "user", "content": content}]}
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("GRPOZOO_JUDGE_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers, method="POST")
        with urllib.request.build_opener(NoRedirect).open(request, timeout=self.timeout) as answer:
            text = json.load(answer)["choices"][0]["message"]["content"]
        lists = re.findall(r"\[[^][]*\]", text)
        if not lists:
            raise ValueError(f"no list of labels in {text!r:.80}")
        return [str(label).strip().lower() for label in json.loads(lists[-1])]


def _check_url(url: str) -> None:
    """An address of a web server: urllib would open files too."""
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is none
        right = False
    if not right:
        raise ValueError(f"url is http://HOST/... or https://HOST/..., got {url!r}")


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to a host that nobody named, and turns a POST into a GET."""

    def redirect_request(self, request, file, code, message, headers, newurl):
        raise OSError(f"{request.full_url} redirects to {newurl}: give that address if you trust it")


INSTRUCTION = """Below is a problem and a solution whose final answer is right. Divide the solution into its atomic steps: \
each is one inference, one calculation or one statement. Give every step, in order, exactly one of these labels:
useful: it advances the solution
mechanical: it rewrites or computes something without new information
redundant: it repeats what was there before
reversion: it goes back, undoes something, or follows a detour
error: it is wrong or misleading by itself
Answer with a JSON list of the labels and nothing else, like ["useful", "redundant", "useful"]."""


def asked(prompt: Prompt) -> str:
    """The prompt as text."""
    if prompt.messages is None:
        return prompt.text or ""
    return "\n\n".join(str(message["content"]) for message in prompt.messages)


def _hash(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
