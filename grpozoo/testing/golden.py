"""Numbers of a composition of plugins on a worked example, by the functions that train: hook manager and objective."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from grpozoo.compose.plugins import Active, activate
from grpozoo.compose.settings import command_line
from grpozoo.config import Config
from grpozoo.loop import add_token_rewards
from grpozoo.ops import denominators
from grpozoo.testing.context import Context
from grpozoo.testing.example import Fixture, fixture, whole_batch, with_tables
from grpozoo.update import objective

CONST_LEN = 5  # tokens; max_completion_length of the worked example


def compose(*overrides: str) -> tuple[Config, Active]:
    """The core's settings and the active plugins, fresh ones, of a command line: compose("algo=[a,b]", "plugins.a.x=1").

    Of two values of one key the later counts, a choice of a group too: a test may end with what it changes.
    """
    said = {override.partition("=")[0]: override for override in overrides}
    composed, config = command_line(*said.values())
    return deepcopy(config), activate(composed.plugins, order=config.order)


def loss(
    *overrides: str,
    step: Fixture | None = None,
    advantages: Sequence[float] | Tensor | None = None,
    const_len: int = CONST_LEN,
) -> tuple[float, Tensor]:
    """Loss and its gradient [R, T] with respect to the current log-probabilities, all rows as one optimizer step.

    overrides: a command line, e.g. "algo=[a,b]". step: null = fixture(). advantages: [R] or [R, T]; null = the
    plugins' own on the step's rewards. const_len: C of the aggregation const_len, tokens.
    """
    config, active = compose(*overrides)
    return loss_of(config, active, step or fixture(), advantages, const_len)


def loss_of(
    config: Config,
    active: Active,
    step: Fixture,
    advantages: Sequence[float] | Tensor | None = None,
    const_len: int = CONST_LEN,
) -> tuple[float, Tensor]:
    """`loss` of plugins that are active already; they keep the state that the step leaves in them."""
    run = Context(config, active)
    run.hooks.setup(run=run)
    if advantages is None:
        step, given = _advantages(active, run, step)
    else:
        given = torch.as_tensor(advantages, dtype=torch.float64)
    batch = whole_batch(step.rollouts, step.rewards, given)
    active.hooks.before_update(rollouts=step.rollouts, rewards=step.rewards, advantages=batch.advantages, run=run)
    out = replace(step.out, logprobs=step.out.logprobs.detach().clone().requires_grad_())
    batch = with_tables(active.hooks, batch, out, run)
    how = active.hooks.aggregation()
    value = objective(active.hooks, batch, out, how, denominators(batch.mask, const_len), "all_rows" in active.needs)
    gradient = torch.autograd.grad(value, out.logprobs, allow_unused=True, materialize_grads=True)[0]
    return float(value.detach()), gradient


def advantages(*overrides: str, step: Fixture | None = None) -> Tensor:
    """The plugins' advantages [R] or [R, T] on the step's rewards (null = fixture())."""
    config, active = compose(*overrides)
    run = Context(config, active)
    run.hooks.setup(run=run)
    return _advantages(active, run, step or fixture())[1]


def _advantages(active: Active, run: Context, step: Fixture) -> tuple[Fixture, Tensor]:
    answers = active.hooks.token_rewards(rollouts=step.rollouts, run=run)
    step = step._replace(rewards=add_token_rewards(answers, step.rollouts, step.rewards))
    return step, active.hooks.advantage(rollouts=step.rollouts, rewards=step.rewards, run=run)
