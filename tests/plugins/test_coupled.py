"""Baselines for coupled completions: expected gradients by exact enumeration over the designs' random numbers."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from group_steps import advantage_of, step_of
from grpozoo_plugins.qmc import Design
from test_qmc import AFTER, EDGES, START, decoded, pieces

from grpozoo import UserError
from grpozoo.testing import advantages, check_plugin, compose, example

CENTER = ("algo=coupled",)
CROSS = ("algo=coupled", "plugins.coupled.baseline=cross_block", "sampler=qmc", "plugins.qmc.blocks=2")


def with_blocks(step, blocks):
    return step._replace(rollouts=replace(step.rollouts, design={"block": torch.tensor(blocks)}))


@pytest.mark.parametrize("overrides", [CENTER, CROSS])
def test_conformance(overrides):
    blocks = [row % 2 for row in range(len(example().rollouts))]
    check_plugin("coupled", *overrides, step=with_blocks(example(), blocks))


def test_center_of_the_worked_example():
    """Rewards 1 0 0 1 and 0 .5 1 0: means .5 and .375."""
    found = advantages(*CENTER).tolist()
    assert found == pytest.approx([0.5, -0.5, -0.5, 0.5, -0.375, 0.125, 0.625, -0.375], abs=1e-12)


def cross(rewards, blocks, groups=None):
    return advantage_of(*CROSS, step=with_blocks(step_of(rewards, groups), blocks)).tolist()


def test_cross_block_subtracts_the_mean_of_the_other_blocks():
    found = cross([1, 0, 0.5, 1, 0, 0], [0, 0, 1, 1, 2, 2])
    assert found == pytest.approx([1 - 0.375, -0.375, 0.5 - 0.25, 0.75, -0.625, -0.625], abs=1e-12)
    assert cross([1, 0, 0.5, 1], [0, 1, 0, 1], [3, 3, 9, 9]) == [1.0, -1.0, -0.5, 0.5]  # groups apart


def test_rows_without_a_reward_leave_their_block():
    assert cross([1, None, 0, None], [0, 0, 1, 1]) == [1.0, 0.0, -1.0, 0.0]
    assert cross([1, 0, None, None], [0, 0, 1, 1]) == [0.0, 0.0, 0.0, 0.0]  # nothing to compare with
    assert cross([0.1] * 6, [0, 0, 0, 1, 1, 1]) == [0.0] * 6


# Section 6.4: one token of four, gradient with respect to its logits


FOUR = (0.25, 0.25, 0.25, 0.25)
G = {(1, 1, 0, 0): [0.125, 0.125, -0.125, -0.125], (1, 0, 1, 0): [0.125, -0.125, 0.125, -0.125]}


def tokens(u):
    return [leaf[0] for leaf in decoded(u, law=lambda prefix: FOUR, tokens=1)[0]]


def draws(design, k):
    """(chance, numbers) of every essentially different draw of the design: one from each cell of the four tokens."""
    grid = [0.125, 0.375, 0.625, 0.875]
    if design is Design.lattice:
        middles, lengths = pieces([0, 0.25, 0.5, 0.75, 1], 1 / k)
        return [(length * k, [m + i / k for i in range(k)]) for m, length in zip(middles, lengths, strict=True)]
    strata = [[u for u in grid if i <= u * k < i + 1] for i in range(k)] if k > 1 else [grid]
    return [(1 / len(grid) ** k * k**k, list(u)) for u in product(*strata)]


def update(chosen, rewards, blocks=None):
    """mean_i A_i grad log p(x_i)."""
    A = cross(rewards, blocks) if blocks else advantage_of(*CENTER, rewards=rewards).tolist()
    s = torch.eye(4, dtype=torch.float64)[chosen] - 0.25
    return (torch.tensor(A, dtype=torch.float64)[:, None] * s).mean(0)


@pytest.mark.parametrize(
    "design, r, share, passing",
    [
        ("lattice", (1, 1, 0, 0), 1, 1.0),
        ("stratified", (1, 1, 0, 0), 1, 1.0),
        ("lattice", (1, 0, 1, 0), 0, 0.5),  # it cannot see this direction
        ("stratified", (1, 0, 1, 0), 0.5, 0.75),
    ],
)
def test_centred_updates_of_two_coupled_rows(design, r, share, passing):
    """E[update] in units of g; independent rows give g / 2 and .75."""
    cases = [(chance, tokens(u)) for chance, u in draws(Design[design], 2)]
    assert sum(chance for chance, _ in cases) == pytest.approx(1, abs=1e-12)
    mean = sum(chance * update(chosen, [r[v] for v in chosen]) for chance, chosen in cases)
    assert mean.tolist() == pytest.approx([share * value for value in G[r]], abs=1e-12)
    assert sum(chance * any(r[v] for v in chosen) for chance, chosen in cases) == pytest.approx(passing, abs=1e-12)


@pytest.mark.parametrize(
    "design, r, share", [("lattice", (1, 1, 0, 0), 2), ("stratified", (1, 1, 0, 0), 2), ("stratified", (1, 0, 1, 0), 1)]
)
def test_why_leave_one_out_is_refused(design, r, share):
    """E[update] with the mean of the others, in units of g; independent rows give g."""
    mean = 0.0
    for chance, u in draws(Design[design], 2):
        chosen = tokens(u)
        A = advantage_of("algo=rloo", rewards=[float(r[v]) for v in chosen])
        s = torch.eye(4, dtype=torch.float64)[chosen] - 0.25
        mean = mean + chance * (A[:, None] * s).mean(0)
    assert mean.tolist() == pytest.approx([share * value for value in G[r]], abs=1e-12)


@pytest.mark.parametrize("design, size", [("lattice", 1), ("lattice", 2), ("stratified", 2)])
@pytest.mark.parametrize("r", list(G))
def test_cross_block_is_exactly_unbiased(design, size, r):
    """Two independent blocks: every pair of their draws."""
    one = [(chance, tokens(u)) for chance, u in draws(Design[design], size)]
    total = 0.0
    for (a, first), (b, second) in product(one, one):
        chosen = first + second
        total = total + a * b * update(chosen, [r[v] for v in chosen], [0] * size + [1] * size)
    assert total.tolist() == pytest.approx(G[r], abs=1e-12)


def test_centring_on_a_chain_is_biased_by_the_covariance_of_the_groups_means():
    """Lattice of 4 on the chain of section 6.1: E[update] = g - Cov(mean s, mean r), with 9 different rewards."""
    k, rewards = 4, {leaf: 0.1 * (2 * leaf[0] + leaf[1] ** 2) for leaf in product(range(3), repeat=2)}
    eye = torch.eye(3, dtype=torch.float64)

    def score(leaf):  # of the two laws that the completion went through: 3 + 9 logits
        s = torch.zeros(12, dtype=torch.float64)
        s[:3] = eye[leaf[0]] - torch.tensor(START, dtype=torch.float64)
        own = slice(3 + 3 * leaf[0], 6 + 3 * leaf[0])
        s[own] = eye[leaf[1]] - torch.tensor(AFTER[leaf[0]], dtype=torch.float64)
        return s

    g = sum(START[a] * AFTER[a][b] * r * score((a, b)) for (a, b), r in rewards.items())
    mean = covariance = 0.0
    for middle, length in zip(*pieces(EDGES, 1 / k), strict=True):
        leaves, _ = decoded([middle + i / k for i in range(k)])
        r = [rewards[leaf] for leaf in leaves]
        s = torch.stack([score(leaf) for leaf in leaves])
        A = advantage_of(*CENTER, rewards=r)
        mean = mean + length * k * (A[:, None] * s).mean(0)
        covariance = covariance + length * k * s.mean(0) * sum(r) / k  # E[mean s] = 0
    torch.testing.assert_close(mean, g - covariance, rtol=0, atol=1e-12)
    assert float(covariance.norm() / g.norm()) < 1 / k  # independent rows: exactly 1 / k


# Refusals


@pytest.mark.parametrize("extra", [[], ["sampler=qmc"]])
def test_cross_block_needs_blocks(extra):
    config, active = compose("algo=coupled", "plugins.coupled.baseline=cross_block", *extra)
    with pytest.raises(UserError, match=r"cross_block needs.*independent blocks(.|\n)*plugins.qmc.blocks=2"):
        active.hooks.validate(config=config, active=active)
    config, active = compose(*CROSS)
    assert not active.hooks.validate(config=config, active=active)


def test_rollouts_without_blocks_are_an_error():
    with pytest.raises(UserError, match="independent blocks"):
        advantage_of(*CROSS, rewards=[1, 0])
