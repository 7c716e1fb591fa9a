"""Steps whose completions hold several answers: reward matrices and groups, and what a composition makes of them."""

from dataclasses import replace

import numpy as np
import torch
from group_steps import step_of

from grpozoo.testing import Context, compose, example

W = [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.25, 0.25, 0.5]]
SPECIALISTS = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
COMPROMISE = [[0.6, 0.6, 0.6], [0.6, 0.6, 0.6], [0, 0, 0]]  # a duplicated compromise
MIXED = [[1, 0, 0], [0.6, 0.6, 0.6], [0, 0, 0]]
SHEET = [SPECIALISTS, COMPROMISE, MIXED, []]  # the fourth does not parse


def matrices(sets, d=None):
    """Tensors [m, d]; None: no reward, a line of NaN."""
    d = d or next(len(M[0]) for M in sets if M is not None and len(M))
    filled = [[[float("nan")] * d] if M is None else M for M in sets]
    return tuple(torch.tensor(np.array(M, dtype=float).reshape(-1, d)) for M in filled)


def composed(*overrides, **options):
    """A stand-in run with the plugins of a command line; options: of the first plugin named by algo."""
    config, active = compose(*overrides)
    name = overrides[0].removeprefix("algo=")
    for key, value in options.items():
        setattr(active.plugins[name], key, value)
    return Context(config, active)


def step_with(sets, groups=None, d=None):
    """A step whose rewards hold the matrices as the vector "parts"; the number beside it is of no interest."""
    return step_of([0.0] * len(sets), groups, vectors={"parts": matrices(sets, d)})


def shaped(run, step):
    """The rewards as transform_rewards leaves them."""
    return run.hooks.transform_rewards(rollouts=step.rollouts, rewards=step.rewards, run=run)


def set_rewards(run, sets, groups=None, d=None):
    """R as a list."""
    return shaped(run, step_with(sets, groups, d)).total.tolist()


def advantages(run, sets, groups=None):
    """A as a list."""
    step = step_with(sets, groups)
    return run.hooks.advantage(rollouts=step.rollouts, rewards=shaped(run, step), run=run).tolist()


def ragged():
    """The kit's example with matrices of 0 to 3 lines, one of them without a reward."""
    step, rng = example(), np.random.default_rng(5)
    sets = [rng.random((row % 4, 3)).tolist() for row in range(len(step.rollouts))]
    sets[6] = None
    return step._replace(rewards=replace(step.rewards, vectors={"parts": matrices(sets)}))


class Slots:
    """A policy without a network: `slots` answers a completion, each a softmax (choices > 1 columns) of its own."""

    def __init__(self, slots, choices):
        self.logits = np.zeros((slots, choices))

    def sample(self, n, rng):
        """[n, slots] choices."""
        gumbel = rng.gumbel(size=(n, *self.logits.shape))
        return (self.logits + gumbel).argmax(-1)

    def learn(self, chosen, A, lr):
        """One REINFORCE step on the mean of A grad log p."""
        p = np.exp(self.logits - self.logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        hot = np.eye(self.logits.shape[1])[chosen]  # [n, slots, choices]
        self.logits += lr * np.einsum("n,nsc->sc", A, hot - p) / len(A)
