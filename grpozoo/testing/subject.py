"""The plugin under test, inside the composition that a user would run it in, and what its hooks do with a step."""

from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from grpozoo.compose.plugins import Active, activate
from grpozoo.compose.registry import installed
from grpozoo.config import Config
from grpozoo.hooks import KINDS, Plugin
from grpozoo.loop import add_token_rewards, per_token
from grpozoo.ops import denominators
from grpozoo.testing.context import Context
from grpozoo.testing.example import Fixture, example, leaf, whole_batch, with_tables
from grpozoo.types import Batch, Output, Rewards, Rollouts
from grpozoo.update import objective

DATA = (Rollouts, Rewards, Batch, Output)
CONST_LEN = 6  # tokens


class ConformanceError(AssertionError):
    """What a plugin breaks."""


def claim(condition: Any, message: str) -> None:
    """Raise ConformanceError(message) unless the condition holds."""
    if not condition:
        raise ConformanceError(message)


class Live:
    """A fresh set of plugins (no state from earlier checks) with the stand-in for the run."""

    def __init__(self, subject: "Subject"):
        self.subject = subject
        self.active: Active = activate(subject.composed.plugins, subject.found)
        self.hooks, self.needs = self.active.hooks, self.active.needs
        self.plugin: Plugin = self.active.plugins[subject.name]
        self.run = Context(subject.config, self.active)
        self.hooks.setup(run=self.run)

    def advantage(self, step: Fixture) -> Tensor:
        """[R] or [R, T], as the plugins answer."""
        return self.hooks.advantage(rollouts=step.rollouts, rewards=step.rewards, run=self.run)

    def wide_advantage(self, step: Fixture) -> Tensor:
        """[R, T], checked by the loop's own function, in the dtype of the answer."""
        answer = self.advantage(step)
        per_token(answer, step.rollouts, step.rewards)
        wide = answer if answer.ndim == 2 else answer[:, None].expand(step.batch.mask.shape)
        return wide.masked_fill(~step.batch.mask | step.rewards.total.isnan()[:, None], 0.0)

    def begin(self, step: Fixture) -> Fixture:
        """Advantages by the plugins, then before_update and minibatch; the step as the update will see it."""
        step = self.trim(step)
        answers = self.hooks.token_rewards(rollouts=step.rollouts, run=self.run)
        step = step._replace(rewards=add_token_rewards(answers, step.rollouts, step.rewards))
        batch = whole_batch(step.rollouts, step.rewards, self.wide_advantage(step))
        self.hooks.before_update(
            rollouts=step.rollouts, rewards=step.rewards, advantages=batch.advantages, run=self.run
        )
        return step._replace(batch=with_tables(self.hooks, batch, step.out, self.run))

    def trim(self, step: Fixture) -> Fixture:
        """Only what the plugins said they need is there."""
        rollouts, needs = step.rollouts, self.needs
        missing = {name: None for name in ("ref_logprobs", "entropy") if name not in needs}
        rollouts = Rollouts(**{f.name: missing.get(f.name, getattr(rollouts, f.name)) for f in fields(Rollouts)})
        out = Output(leaf(step.out.logprobs), leaf(step.out.entropy) if "entropy" in needs else None)
        return step._replace(
            rollouts=rollouts, batch=whole_batch(rollouts, step.rewards, step.batch.advantages), out=out
        )

    def tokens(self, step: Fixture) -> dict[str, Tensor]:
        """What the update's hooks answer, each [R, T]: policy_loss, token_weights (product), regularizer (sum)."""
        batch, out = step.batch, step.out
        losses = self.hooks.policy_loss(batch=batch, out=out)
        weights, terms = torch.ones_like(losses), torch.zeros_like(losses)
        for hook in ("token_weights", "regularizer"):
            for answer in getattr(self.hooks, hook)(batch=batch, out=out):
                answer = answer[0] if isinstance(answer, tuple) else answer
                weights, terms = (weights * answer, terms) if hook == "token_weights" else (weights, terms + answer)
        answers = {"policy_loss": losses, "token_weights": weights, "regularizer": terms}
        return {name: answer.detach().expand(batch.mask.shape) for name, answer in answers.items()}

    def objective(self, step: Fixture, batch: Batch | None = None, out: Output | None = None) -> Tensor:
        """The (micro-)batch's share of the loss; denominators are those of the whole step."""
        how = self.hooks.aggregation()
        whole = denominators(step.batch.mask, CONST_LEN)
        return objective(self.hooks, batch or step.batch, out or step.out, how, whole, "all_rows" in self.needs)

    def value_and_gradients(self, step: Fixture) -> tuple[Tensor, list[Tensor]]:
        """Loss, and gradients [R, T] with respect to log-probabilities (and entropies)."""
        leaves = [values for values in (step.out.logprobs, step.out.entropy) if values is not None]
        value = self.objective(step)
        return value.detach(), gradients(value, leaves)


@dataclass
class Subject:
    """A plugin by name, with the command line that switches it on."""

    name: str
    overrides: tuple[str, ...]
    step: Fixture | None = None

    @cached_property
    def composed(self):
        """The composed configuration; its plugins' options with random access."""
        from grpozoo.compose.command import compose

        composed = compose(list(self.overrides))
        claim(
            self.name in composed.plugins,
            f"{' '.join(self.overrides) or 'no override'} does not switch it on: plugins are {', '.join(composed.plugins)}",
        )
        return composed

    @cached_property
    def found(self):
        """The installed plugins, looked up once."""
        return installed()

    @cached_property
    def config(self) -> Config:
        """The core's settings."""
        from grpozoo.compose.settings import read_core

        return read_core(self.composed)

    @cached_property
    def answers(self) -> set[str]:
        """Hooks that the plugin implements."""
        return {hook for hook, names in implementations(self.fresh().active).items() if self.name in names}

    @cached_property
    def logged(self) -> set[str]:
        """Names that the plugin logged while it was checked."""
        return set()

    @contextmanager
    def live(self):
        """Fresh plugins; what they log is remembered."""
        live = self.fresh()
        yield live
        self.logged.update(name for name, _, _ in live.plugin.logged)

    def fresh(self) -> Live:
        """New plugins, no state."""
        return Live(self)

    def example(self) -> Fixture:
        """The ragged step, or the author's own."""
        return deepcopy_step(self.step) if self.step else example()


def implementations(active: Active) -> dict[str, list[str]]:
    """Hook -> names of all plugins that implement it, overruled ones included."""
    return {hook: [impl.plugin_name for impl in getattr(active.hooks, hook).get_hookimpls()] for hook in KINDS}


def gradients(value: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients, zeros where the value does not depend on a leaf."""
    if not value.requires_grad:
        return [torch.zeros_like(values) for values in leaves]
    return list(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))


def deepcopy_step(step: Fixture) -> Fixture:
    """A copy whose tensors may be touched."""
    out = Output(leaf(step.out.logprobs), leaf(step.out.entropy))
    return Fixture(deepcopy(step.rollouts), deepcopy(step.rewards), deepcopy(step.batch), out)
