"""Two processes of one run, simulated by threads, beside one process: the same steps must come out of both.

Requests, rewards, passes and micro-batches are divided as a run divides them; what a plugin notes in itself while it
sees a part stays in its own process. Completions come from the composition's engine on a random policy, verdicts from
a hash of the completion, and the policy never moves: two steps take a fraction of a second.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpozoo.cycle import Cycle
from grpozoo.errors import UserError
from grpozoo.loop import collect
from grpozoo.ops import denominators
from grpozoo.packing import cut, share
from grpozoo.rewards.score import score
from grpozoo.rng import key
from grpozoo.rollout import in_order
from grpozoo.sampling import Greedy, Law
from grpozoo.testing.context import Context, Copy
from grpozoo.testing.subject import ConformanceError, Live, Subject, claim
from grpozoo.types import Output, Request, Rewards, Rollouts, concatenate
from grpozoo.update import batch_of, minibatch_tables, objective

STEPS, PROMPTS, TOKENS = 2, 3, 6  # of a simulated run: its steps, prompts of each, longest completion
PATIENCE = 60.0  # seconds that one process waits for the other
TOLERANCE = 1e-5  # of float32 sums that are added in another order


class Verdicts(Copy):
    """The prompts of a step; right or wrong by a hash of the completion, so that groups are mixed."""

    decides = True

    def __init__(self, rollouts: Rollouts):
        super().__init__()
        prompts = {prompt.id: prompt for prompt in rollouts.prompts}.values()
        self.train = [replace(prompt, text=prompt.text or f"say {prompt.answer}", messages=None) for prompt in prompts]

    def verify(self, prompt, completion):
        """0 or 1."""
        return float(key(prompt.id, completion) % 2)


class Left(UserError):
    """The other process failed, or asks for something else; it passes a plugin's hook unchanged."""


class Exchange:
    """What the processes have between them: each gives something and gets what all gave, in the order of the ranks."""

    def __init__(self, world: int):
        self.world, self.barrier = world, Barrier(world, timeout=PATIENCE)
        self.given: list[tuple[str, Any]] = [("", None)] * world
        self.trouble = f"one process waits for the other, in vain for {PATIENCE:g} s"

    def all(self, rank: int, what: str, value: Any = None) -> list[Any]:
        """The values of all processes; each must have come with the same `what`."""
        self.given[rank] = what, value
        try:
            self.barrier.wait()
            given = list(self.given)
            self.barrier.wait()
        except BrokenBarrierError:
            raise Left(self.trouble) from None
        asked = [name for name, _ in given]
        if len(set(asked)) > 1:
            self.trouble = f"process 0 comes to {asked[0]} and process 1 to {asked[-1]}: a run would hang there"
            raise Left(self.trouble)
        return [value for _, value in given]


class Process(Context):
    """One of several processes of a run: it does its part of the work and exchanges the results.

    Its methods are not marked `collective`, a mark of the whole program: while one asks the rewards, the other waits.
    """

    def __init__(self, live: Live, rank: int, exchange: Exchange):
        config = live.run.config
        short = min(config.max_completion_length, TOKENS)
        config = replace(config, prompts_per_step=PROMPTS, max_completion_length=short)
        super().__init__(config, live.active, step=0)
        self.rank, self.world, self.exchange, self.task = (
            rank,
            exchange.world,
            exchange,
            Verdicts(live.subject.example().rollouts),
        )
        self.clock = SimpleNamespace(start=lambda: None)  # nothing is measured
        self.policy.model.requires_grad_(False)
        self.hooks.setup(run=self)

    def timer(self, name: str):
        """Nothing is measured."""
        return nullcontext()

    def observe(self, rollouts: Rollouts, rewards: Rewards) -> dict:
        """No metrics of the step."""
        return {}

    def generate(self, requests: list[Request], temperature: float | None = None) -> Rollouts:
        """Completions by the engine, every `world`-th request here."""
        law = self.policy.law if temperature is None else Law(temperature)
        sampler = Greedy() if law.temperature == 0 else self.hooks.token_sampler(run=self)
        parts = []
        for name in sorted({request.policy for request in requests}) or ["policy"]:
            mine = [request for request in requests[self.rank :: self.world] if request.policy == name]
            policy = self.policies[name]
            parts.append(self.hooks.generate(requests=mine, sampler=sampler, law=law, policy=policy, run=self))
        return in_order(concatenate(self.gather(parts)), requests)

    def score(self, rollouts: Rollouts) -> Rewards:
        """Rewards that the first process asks for, shaped in each."""
        rewards = score(self.hooks, self.plugins, rollouts, self, timeout=PATIENCE) if self.rank == 0 else None
        rewards = self.exchange.all(self.rank, "score()", rewards)[0]
        return self.hooks.transform_rewards(rollouts=rollouts, rewards=rewards, run=self)

    def measure(self, rollouts: Rollouts) -> Rollouts:
        """Log-probabilities of the reference and entropies that a hash could have made."""
        wave = (rollouts.completion_ids * 0.7).sin() * rollouts.completion_mask  # [R, T] in [-1, 1]
        reference, entropy = rollouts.logprobs + 0.1 * wave, 0.5 * wave.abs()
        entropy = entropy if "entropy" in self.needs else None
        reference = reference if "ref_logprobs" in self.needs else None
        return replace(rollouts, old_logprobs=rollouts.logprobs, ref_logprobs=reference, entropy=entropy)

    def mine(self, rollouts: Rollouts, rows: list[int]) -> Iterator[tuple[list[int], Rollouts]]:
        """This process's rows at once."""
        live = [row for row in rows if bool(rollouts.completion_mask[row].any())]
        part = share(rollouts, live, self.rank, self.world)
        if part:
            yield part, cut(rollouts.select(part))

    def gather(self, parts: list) -> list:
        """Lists of all processes, one after the other."""
        return [item for part in self.exchange.all(self.rank, "gather()", parts) for item in part]

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the processes."""
        return torch.stack(self.exchange.all(self.rank, f"sum() of {tuple(values.shape)}", values)).sum(0)

    def sum_gradients(self, parameters: list) -> None:
        """Gradients of all processes, added up."""
        total = self.sum(torch.cat([parameter.grad.flatten() for parameter in parameters]))
        for parameter, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))


def steps(run: Process) -> list[dict[str, Tensor]]:
    """What each step of a run comes to: its rows, their rewards and advantages, and the gradient of its loss."""
    seen = []
    for step in range(STEPS):
        run.step = step
        cycle = collect(run)
        rollouts = cycle.rollouts
        gradient = sum(gradient_of(run, cycle, rows) for rows in cycle.minibatches)
        found = {
            "group_id": rollouts.group_id,
            "completion_ids": rollouts.completion_ids,
            "logprobs": rollouts.logprobs,
        }
        found |= {f"reward {name!r}": values for name, values in cycle.rewards.components.items()}
        seen.append(found | {"total": cycle.rewards.total, "advantage": cycle.advantages, "gradient": gradient})
        run.hooks.after_step(step=step + 1, metrics={}, run=run)
    return seen


def gradient_of(run: Process, cycle: Cycle, rows: list[int]) -> Tensor:
    """[R, T]: of an optimizer step's loss with respect to the log-probabilities, a policy next to the sampled one."""
    rollouts = cycle.rollouts
    drift = 0.2 * (rollouts.completion_ids * 1.3).cos() * rollouts.completion_mask
    current = (rollouts.logprobs + drift).requires_grad_()
    mask, how = rollouts.completion_mask[rows], run.hooks.aggregation()
    cycle.tables = {}

    def part(own: list[int]) -> tuple:
        batch = batch_of(cycle, own, torch.device("cpu"))
        width = batch.mask.shape[1]
        entropy = None if rollouts.entropy is None else rollouts.entropy[own, :width]
        return batch, Output(current[own, :width], entropy)

    batch, out = part(rows)
    fixed = replace(out, logprobs=out.logprobs.detach())
    cycle.tables = minibatch_tables(run.hooks, batch, fixed, run, len(rollouts))
    total = torch.zeros_like(current)
    if own := share(rollouts, rows, run.rank, run.world):
        batch, out = part(own)
        whole = denominators(mask, run.config.max_completion_length)
        loss = objective(run.hooks, batch, out, how, whole, "all_rows" in run.needs)
        if loss.requires_grad:
            total = torch.autograd.grad(loss, current)[0]
    return run.sum(total)


def together(lives: list[Live], program: Callable[[Process], Any]) -> list[Any]:
    """What `program` makes of each process; the first failure of any."""
    exchange = Exchange(len(lives))
    runs = [Process(live, rank, exchange) for rank, live in enumerate(lives)]

    def work(run: Process) -> Any:
        try:
            answer = program(run)
            exchange.all(run.rank, "the end of the run")
            return answer
        except Left:  # of those, the other process or the exchange says why
            exchange.barrier.abort()
            return None
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(len(runs)) as pool:
        answers = list(pool.map(work, runs))
    if any(answer is None for answer in answers):
        raise ConformanceError(exchange.trouble)
    return answers


def check_processes(subject: Subject) -> None:
    """Two steps of two processes are the two steps of one."""
    (alone,) = together([subject.fresh()], steps)
    both = together([subject.fresh(), subject.fresh()], steps)
    for step in range(STEPS):
        for name, expected in alone[step].items():
            first, second = (seen[step].get(name) for seen in both)
            where = f"{name} of step {step + 1}"
            claim(_same(first, second), f"{where} is another one in each of two processes")
            claim(_same(first, expected), f"{where} is another one with two processes than with one")


def _same(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None or found.shape != expected.shape:
        return found is expected
    return torch.allclose(found.double(), expected.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
