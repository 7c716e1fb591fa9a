"""BNPO's numbers on the worked example, its density against scipy's, and the ends of its range."""

import pytest
from group_steps import F1, advantage_of, run_of, step_of
from grpozoo_plugins.bnpo import Bnpo
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta as beta_law

from grpozoo import UserError
from grpozoo.testing import advantages

EXPECTED = [0.197128, -0.197128, -0.197128, 0.197128, -0.148362, 0.049454, 0.247270, -0.148362]


def test_advantages_of_the_worked_example():
    """p = .5, .375: m = .4375, v = .0078125, a + b = 30.5, alpha = 1 + 30.5 * .4375 / 3, beta = 1 + 30.5 * .5625 / 3."""
    assert advantages("algo=bnpo").tolist() == pytest.approx(EXPECTED, abs=1e-6)


def test_the_fitted_law_of_the_worked_example_is_logged():
    run = run_of("algo=bnpo", "seed=1")
    advantage_of("algo=bnpo", "seed=1", **F1)
    logged = {name: value for name, value, _ in run.plugins["bnpo"].logged}
    assert logged == pytest.approx({"bnpo/alpha": 5.447917, "bnpo/beta": 6.71875}, abs=1e-6)


def test_rewards_of_another_range_are_mapped_first():
    options = ("algo=bnpo", "plugins.bnpo.reward_min=-1", "plugins.bnpo.reward_max=1")
    found = advantage_of(*options, rewards=[2 * r - 1 for r in F1["rewards"]], groups=F1["groups"])
    assert found.tolist() == pytest.approx(EXPECTED, abs=1e-6)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_the_weight_is_one_over_the_density(batch):
    """Recomputed with scipy, for groups of any size."""
    means = [sum(group) / len(group) for group in batch]
    m = sum(means) / len(means)
    v = sum((x - m) ** 2 for x in means) / (len(means) - 1)
    size = m * (1 - m) / v - 1 if max(means) > min(means) else 0
    alpha, beta = max(1, 1 + size * m / 3), max(1, 1 + size * (1 - m) / 3)
    rewards = [r for group in batch for r in group]
    groups = [number for number, group in enumerate(batch) for _ in group]
    found = advantage_of("algo=bnpo", rewards=rewards, groups=groups).tolist()
    for row, (r, g) in enumerate(zip(rewards, groups, strict=True)):
        density = beta_law.pdf(means[g], alpha, beta)
        expected = 0.0 if means[g] in (0, 1) else min(1 / density, 1e6) * (r - means[g])
        assert found[row] == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("groups", [[0] * 4, [0, 0, 1, 1]])
def test_without_spread_between_prompts_it_is_plain_centring(groups):
    """One prompt, or two of the same mean."""
    assert advantage_of("algo=bnpo", rewards=[1, 0, 0, 1], groups=groups).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_the_weight_is_capped():
    """Means .5 (99 times) and .001: the density at .001 is far below 1e-6."""
    rewards = [1, 0] * 99 + [0.002, 0]
    found = advantage_of("algo=bnpo", rewards=rewards, groups=[row // 2 for row in range(200)]).tolist()
    assert found[-2:] == pytest.approx([1e6 * 0.001, -1e6 * 0.001], abs=1e-6)


def test_rewards_outside_the_range_are_refused():
    with pytest.raises(UserError, match="from 0 to 1, got -0.5 to 1(.|\n)*reward_min"):
        advantage_of("algo=bnpo", rewards=[1, None, -0.5])
    step = step_of([0.1 + 0.2 + 0.7 + 2e-16, 0])  # rounding is no mistake
    assert advantage_of("algo=bnpo", step=step).tolist() == pytest.approx([0.5, -0.5], abs=1e-12)


def test_an_empty_range_is_refused():
    with pytest.raises(ValueError, match="reward_max"):
        Bnpo.Config(reward_min=1.0)
