"""Long2Short: the numbers of the method sheet, and what must not change."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo import UserError
from grpozoo.testing import Context, advantages, assemble, compose
from grpozoo.testing.example import TOKEN_FIELDS

NAN = float("nan")


def step_of(rewards, lengths, groups=None):
    """A step whose rewards are the verdicts too (1 is right, NaN unknown)."""
    zeros = torch.zeros(len(lengths), max(max(lengths), 1), dtype=torch.float64)
    return assemble(lengths, groups or [0] * len(lengths), rewards, dict.fromkeys(TOKEN_FIELDS, zeros), zeros)


@cache
def composed():
    return compose("algo=long2short")


def shaped(rewards, lengths, groups=None, coef=0.2):
    """r' [R] and the step."""
    config, active = composed()
    active.plugins["long2short"].config.coef = coef
    step = step_of(rewards, lengths, groups)
    after = active.hooks.transform_rewards(rollouts=step.rollouts, rewards=step.rewards, run=Context(config, active))
    return after.total, step._replace(rewards=after)


def test_the_worked_example():
    """1/L = .00125 .000625 .0003125, mean .000729166; differences .000520833 -.000104166 -.000416666 over the first."""
    total, step = shaped([1.0, 1.0, 0.0, 1.0, 0.0], [800, 1600, 900, 3200, 500])
    assert total.tolist() == pytest.approx([1.2, 0.96, 0, 0.84, 0], abs=1e-9)
    found = advantages("algo=long2short", "plugins.grpo.eps=1e-6", step=step)  # mean .6, std .562849
    assert found.tolist() == pytest.approx([1.066002, 0.639601, -1.066002, 0.426401, -1.066002], abs=1e-6)


@pytest.mark.parametrize("rewards", [[0, 1, 1, 1], [1, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]])
def test_equal_lengths_and_single_right_answers_stay_as_they_are(rewards):
    """Thrice 1/5 has a mean that rounds; a spread of 3e-17 must not become one of 0.2."""
    lengths = [5 if reward else 3 + row for row, reward in enumerate(rewards)]
    assert sum([1 / 5] * 3) / 3 != 1 / 5
    assert shaped([float(reward) for reward in rewards], lengths)[0].tolist() == rewards


def test_groups_are_shaped_one_by_one_and_unknown_verdicts_stay_out():
    rewards, groups = [1.0, 1.0, 1.0, NAN, 1.0, 0.0], [5, -2, 5, 5, -2, 5]
    total, _ = shaped(rewards, [2, 1, 4, 1, 1, 3], groups)
    assert total.nan_to_num(-9).tolist() == pytest.approx([1.2, 1.0, 0.8, -9, 1.0, 0.0])


def test_right_is_what_the_verdict_says_whatever_the_total_is():
    """The component is 1 where the answer is right; the totals hold other rewards too."""
    config, active = composed()
    active.plugins["long2short"].config.coef = 0.2
    step = step_of([1.0, 1.0, 0.0], [1, 2, 3])
    rewards = replace(
        step.rewards, components=step.rewards.components | {"form": torch.tensor([0.0, 0.5, 5.0]).double()}
    )
    rewards = replace(rewards, weights={"answer": 1.0, "form": 1.0})
    after = active.hooks.transform_rewards(rollouts=step.rollouts, rewards=rewards, run=Context(config, active))
    assert after.total.tolist() == pytest.approx([1.2, 1.3, 5.0])


def test_an_empty_right_completion_counts_as_one_token():
    assert shaped([1.0, 1.0, 1.0], [0, 1, 4])[0].isfinite().all()


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, NAN]), st.integers(1, 30)), min_size=1, max_size=20
    ),
    st.floats(0.01, 0.99),
)
@settings(max_examples=40, deadline=None)
def test_it_adds_nothing_in_sum_keeps_the_order_and_orders_by_length(rows, coef):
    groups, rewards, lengths = map(list, zip(*rows, strict=True))
    total = shaped(rewards, lengths, groups, coef=coef)[0].tolist()
    for group in set(groups):
        right = [i for i in range(len(rows)) if groups[i] == group and rewards[i] == 1]
        changes = [total[i] - 1 for i in right]
        assert sum(changes) == pytest.approx(0, abs=1e-9)
        assert all(total[i] >= 1 - coef - 1e-9 for i in right)  # above every wrong one
        if len({lengths[i] for i in right}) > 1:
            assert max(map(abs, changes)) == pytest.approx(coef)
            by_length = [total[i] for i in sorted(right, key=lambda i: lengths[i])]
            assert by_length == sorted(by_length, reverse=True)
    assert [total[i] for i in range(len(rows)) if rewards[i] == 0] == [0.0] * rewards.count(0.0)


def test_a_negative_coefficient_is_refused_and_zero_changes_nothing():
    assert shaped([1.0, 1.0, 0.0], [1, 2, 3], coef=0)[0].tolist() == [1.0, 1.0, 0.0]
    with pytest.raises(UserError, match="coef is at least 0"):
        compose("algo=long2short", "plugins.long2short.coef=-1")
