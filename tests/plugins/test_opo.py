"""OPO's numbers on the worked example, and what the length-weighted baseline promises."""

import pytest
from group_steps import advantage_of
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo.testing import advantages, compose


def test_advantages_of_the_worked_example():
    """Group 0: (3 + 4) / 14 = .5; group 1: (4 * .5 + 5) / 13 = .538462."""
    expected = [0.5, -0.5, -0.5, 0.5, -0.538462, -0.038462, 0.461538, -0.538462]
    assert advantages("algo=opo").tolist() == pytest.approx(expected, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-5, 5), st.integers(0, 6)), min_size=1, max_size=16))
@settings(max_examples=60, deadline=None)
def test_advantages_times_lengths_add_up_to_zero_in_every_group(rows):
    groups, rewards, lengths = (list(column) for column in zip(*rows, strict=True))
    found = advantage_of("algo=opo", rewards=rewards, groups=groups, lengths=lengths).tolist()
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        assert sum(lengths[i] * found[i] for i in members) == pytest.approx(0, abs=1e-5)  # spreads of 1e-8 are none


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_equal_lengths_are_plain_centring(rewards, length):
    found = advantage_of("algo=opo", rewards=rewards, lengths=[length] * len(rewards)).tolist()
    assert found == pytest.approx(advantage_of("algo=dr_grpo", rewards=rewards).tolist(), abs=1e-12)


def test_rows_without_a_reward_or_without_tokens():
    """Lengths 1 and 3 of the rows that answered: b = 3 / 4, the 9 tokens of the other do not count."""
    assert advantage_of("algo=opo", rewards=[0, None, 1], lengths=[1, 9, 3]).tolist() == [-0.75, 0, 0.25]
    assert advantage_of("algo=opo", rewards=[0, 1, 1], lengths=[0, 1, 1]).tolist() == [-1, 0, 0]
    assert advantage_of("algo=opo", rewards=[0, 1], lengths=[0, 0]).tolist() == [0, 0]  # no token, no baseline


@pytest.mark.parametrize(
    "override, said", [("update.epochs=1", 0), ("update.epochs=2", 1), ("update.mini_batches=4", 1)]
)
def test_it_says_that_several_updates_per_batch_are_not_on_policy(override, said):
    config, active = compose("algo=opo", override)
    notices = [notice for notice in active.hooks.validate(config=config, active=active) if notice]
    assert len(notices) == said
    assert all("opo" in notice and "on-policy" in notice for notice in notices)
