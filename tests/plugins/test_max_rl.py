"""MaxRL's numbers on the worked example, its weight on rare successes, and the rewards it refuses."""

import pytest
import torch
from group_steps import advantage_of
from grpozoo_plugins.max_rl import MaxRl
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo import UserError
from grpozoo.testing import advantages, compose


def test_advantages_of_the_worked_example():
    """.5 / .500001 and, in the second group, -.375, .125 and .625 over .375001."""
    expected = [0.999998, -0.999998, -0.999998, 0.999998, -0.999997, 0.333332, 1.666662, -0.999997]
    assert advantages("algo=max_rl").tolist() == pytest.approx(expected, abs=1e-6)


@given(st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_one_success_weighs_one_over_the_share_of_successes(right, wrong):
    """Rewards 0 and 1: A = 1 / p - 1 for the right ones and -1 for the wrong ones."""
    found = advantage_of("algo=max_rl", "plugins.max_rl.eps=0", rewards=[1] * right + [0] * wrong).tolist()
    assert found == pytest.approx([(right + wrong) / right - 1] * right + [-1] * wrong, abs=1e-12)


@given(st.lists(st.floats(0.01, 5), min_size=2, max_size=9), st.floats(0.1, 10))
@settings(max_examples=40, deadline=None)
def test_the_unit_of_rewards_does_not_matter_and_groups_add_up_to_zero(rewards, scale):
    options = ("algo=max_rl", "plugins.max_rl.eps=0")
    plain = advantage_of(*options, rewards=rewards)
    scaled = advantage_of(*options, rewards=[scale * r for r in rewards])
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-5)  # spreads of 1e-8 over means of 0.01 count as none
    assert float(plain.sum()) == pytest.approx(0, abs=1e-10)


def test_a_group_without_success_has_advantage_0():
    found = advantage_of("algo=max_rl", "plugins.max_rl.eps=0", rewards=[0, 0, None, 1, 0], groups=[4, 4, 4, 5, 5])
    assert found.tolist() == [0, 0, 0, 1, -1]


def test_a_row_without_a_reward_leaves_its_group():
    assert advantage_of("algo=max_rl", "plugins.max_rl.eps=0", rewards=[1, None, 0]).tolist() == [1, 0, -1]


def test_negative_rewards_are_refused():
    with pytest.raises(UserError, match=r"at least 0.*'p0', sample 1 has -0.25"):
        advantage_of("algo=max_rl", rewards=[1, -0.25, None])


def test_a_reward_that_is_always_a_penalty_is_refused_at_once():
    with pytest.raises(UserError, match="max_rl does not stack with overlong"):
        compose("algo=max_rl", "reward=[answer,overlong]")


def test_an_epsilon_below_zero_is_refused():
    with pytest.raises(ValueError, match="eps"):
        MaxRl.Config(eps=-1e-3)
