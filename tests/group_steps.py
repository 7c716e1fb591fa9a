"""Steps made of rewards and groups alone, and what the advantage of a composition makes of them, by the hook manager."""

from dataclasses import replace
from functools import cache

import torch

from grpozoo.testing import Context, assemble, compose

F1 = dict(rewards=[1, 0, 0, 1, 0, 0.5, 1, 0], groups=[0] * 4 + [1] * 4)  # the worked example


def step_of(rewards, groups=None, lengths=None, **rewards_fields):
    """A step whose rows have these total rewards (None: none), group ids and lengths (default 2 tokens)."""
    totals = [float("nan") if reward is None else float(reward) for reward in rewards]
    lengths = lengths or [2] * len(totals)
    flat = torch.full((len(totals), max(*lengths, 1)), -1.0, dtype=torch.float64)
    tables = {name: flat for name in ("logprobs", "old_logprobs", "ref_logprobs", "entropy")}
    step = assemble(lengths, groups or [0] * len(totals), totals, tables, flat)
    return step._replace(rewards=replace(step.rewards, **rewards_fields))


@cache
def run_of(*overrides):
    """The stand-in for the run, with the plugins of a command line, set up."""
    run = Context(*compose(*overrides))
    run.hooks.setup(run=run)
    return run


def advantage_of(*overrides, step=None, **fields):
    """Advantages [R] or [R, T] of a command line on step_of(**fields)."""
    run, step = run_of(*overrides), step or step_of(**fields)
    return run.hooks.advantage(rollouts=step.rollouts, rewards=step.rewards, run=run)
