"""Tasks: where prompts come from, and who verifies an answer. Found by entry point (group `grpozoo.tasks`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpozoo.types import Prompt


class Task:
    """A training and a held-out set of prompts. Subclass, and register by an entry point in `grpozoo.tasks`.

    `train` and `heldout` are disjoint sequences of Prompt, the same in every process and every run. A streaming task
    sets `train` to an object with `__iter__` only, that yields the same prompts each time it is iterated.
    """

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    notices: Sequence[str] = ()  # what to know about the data, said when the run starts
    places: frozenset[str] = frozenset()  # options that say where the data lie: may change on resume, unlike the data
    decides = True  # whether `verify` tells right from wrong in evaluation; False: the chosen rewards do

    @dataclass
    class Config:
        """No options."""

    def __init__(self, config: Any):
        """Build the sets (no torch, no model); raise UserError for what is wrong with the data."""
        self.config = config

    def verify(self, prompt: Prompt, completion: str) -> float | None:
        """1.0 for a right answer, 0.0 for a wrong one, between for a partial one; None: the task has no verifier."""
        return None

    def final_answer(self, completion: str) -> str | None:
        """What a majority vote compares; None: the completion has no final answer and casts no vote."""
        return completion.strip() or None

    def solution(self, prompt: Prompt) -> str | None:
        """A worked completion that `verify` accepts, for the warm start; None: there is none."""
        return None

    def fingerprint(self) -> str:
        """Hash of the prompts: a run is resumed only on the data that it was started on."""
        raise TypeError(f"{type(self).__name__} does not define fingerprint()")
