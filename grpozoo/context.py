"""What a hook may ask of `run`: the whole of it. A plugin that uses another member may break with any release.

Rollouts and rewards are whole in every process; only work is divided, so every process asks the same questions in the
same order. The training run and the stand-in of the conformance kit both answer all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.random import Generator
    from torch import Tensor

    from grpozoo.types import Prompt, Request, Rewards, Rollouts


class Context(Protocol):
    """The argument `run` of hooks."""

    config: Any  # the core's keys (docs/configuration.md)
    step: int  # finished steps
    task: Any  # where prompts come from, and who verifies an answer
    plugins: Mapping[str, Any]  # name -> active plugin, in the order of application
    hooks: Any  # hooks of all active plugins: run.hooks.reward(rollouts=..., run=run)
    needs: frozenset[str]  # union of what the plugins need
    policies: Mapping[str, Any]  # name -> policy
    policy: Any  # the policy that is trained
    reference: Any  # the policy at the start of the run; None where nobody needs "ref_logprobs"
    rank: int  # of this process, from 0
    world: int  # number of processes

    def stream(self, purpose: str, *key: Any) -> Generator:
        """A numpy generator of one's own: named by purpose, step and key, the same in every process and after a resume."""

    def prompts(self, count: int) -> list[Prompt]:
        """The next prompts of the training data, as the plugins prepare them."""

    def generate(self, requests: list[Request], temperature: float | None = None) -> Rollouts:
        """Completions for the requests, in their order. temperature: null = the run's; 0 = greedy."""

    def given(self, requests: list[Request], texts: list[str]) -> Rollouts:
        """Completions that nobody sampled: one text for each request, its stop token added."""

    def score(self, rollouts: Rollouts) -> Rewards:
        """Rewards of the rollouts, shaped."""

    def measure(self, rollouts: Rollouts) -> Rollouts:
        """Add old_logprobs, entropy and ref_logprobs where a plugin or several updates per batch need them."""

    def verdicts(self, rollouts: Rollouts, rewards: Rewards) -> Tensor:
        """[R] float64, 1 right, 0 wrong, NaN unknown: what evaluation calls right, whatever shapes the rewards."""

    def mine(self, rollouts: Rollouts, rows: list[int]) -> Iterator[tuple[list[int], Rollouts]]:
        """This process's part of the rows in micro-batches: (rows, Rollouts cut to their longest completion)."""

    def gather(self, parts: list) -> list:
        """Concatenate lists over the processes, in the order of their ranks."""

    def sum(self, values: Tensor) -> Tensor:
        """Add a CPU tensor up over the processes."""

    def sum_gradients(self, parameters: list[Tensor]) -> None:
        """Add up the gradients of all processes; their losses already share one denominator."""

    def say(self, text: str) -> None:
        """Print a text above the live line, once in a run, by the main process."""
