"""Process supervision: a group worked by hand, its properties, and steps that do not fit."""

import math
from dataclasses import replace

import pytest
import torch
from grpozoo_plugins.process import Process
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo import UserError
from grpozoo.testing import advantages, assemble, check_plugin, example, loss
from grpozoo.testing.example import TOKEN_FIELDS, select, widen

NONE = torch.full((1, 2), math.nan, dtype=torch.float64)  # a row that got no answer


def matrix(steps):
    return torch.tensor(steps, dtype=torch.float64).reshape(-1, 2)


def step_of(rows, groups=None, lengths=None, totals=None, name="steps"):
    """rows: for each completion its [(last token, reward), ...]."""
    lengths = lengths or [5] * len(rows)
    old = torch.full((len(rows), 5), -1.0, dtype=torch.float64)
    step = assemble(
        lengths, groups or [0] * len(rows), totals or [1.0] * len(rows), dict.fromkeys(TOKEN_FIELDS, old), old
    )
    return step._replace(rewards=replace(step.rewards, vectors={name: tuple(map(matrix, rows))}))


# Rewards 1 0 | 1 | 0 1 1: six steps, mean 4/6, squares 4 * (1/3)^2 + 2 * (2/3)^2 = 4/3.
# ddof 1: std sqrt(4/15) = .5163978; z+ = (1/3) / (.5163978 + .0001) = .6453723, z- = -1.2907446
# ddof 0: std sqrt(4/18) = .4714045; with eps 0 z+ = .7071068, z- = -1.4142136
GROUP = [[(1, 1), (4, 0)], [(2, 1)], [(0, 0), (2, 1), (3, 1)]]


@pytest.mark.parametrize(
    "options, good, bad",
    [([], 0.6453723, -1.2907446), (["plugins.process.ddof=0", "plugins.process.eps=0"], 0.7071068, -1.4142136)],
)
def test_advantages_of_a_group_worked_by_hand(options, good, bad):
    """A token gets the z of the steps that end with it or later; behind the last step nothing ends."""
    found = advantages("algo=process", *options, step=step_of(GROUP))
    by_hand = [
        [good + bad, good + bad, bad, bad, bad],  # steps end at 1 and 4
        [good, good, good, 0, 0],  # at 2
        [bad + good + good, good + good, good + good, good, 0],  # at 0, 2, 3
    ]
    torch.testing.assert_close(found, torch.tensor(by_hand, dtype=torch.float64), rtol=0, atol=1e-6)


def test_loss_and_gradient_on_policy_are_minus_the_mean_advantage():
    """Sums over the tokens of the rows above: 2 z+ + 5 z-; 3 z+; z- + (2 + 2 + 2 + 1) z+."""
    good, bad = 0.6453723, -1.2907446
    total = (2 * good + 5 * bad) + 3 * good + (bad + 7 * good)
    value, gradient = loss("algo=process", "plugins.grpo.aggregation=token_mean", step=step_of(GROUP))
    assert value == pytest.approx(-total / 15, abs=1e-6)
    assert gradient[1].tolist() == pytest.approx([-good / 15] * 3 + [0, 0], abs=1e-6)


def test_one_reward_at_the_end_of_each_row_is_grpo():
    rewards = [1.0, 0.0, 0.5, 0.0]
    step = step_of([[(4, r)] for r in rewards], totals=rewards)
    found = advantages("algo=process", step=step)
    torch.testing.assert_close(found, advantages(step=step)[:, None].expand(found.shape), rtol=0, atol=1e-12)


@pytest.mark.parametrize("value, rows", [(0.1, 7), (0.7, 13), (1e6 + 0.1, 5)])
def test_equal_step_rewards_give_exactly_zero(value, rows):
    step = step_of([[(1, value), (3, value)]] * rows + [[(0, 1.0)], [(0, 0.0)]], groups=[0] * rows + [1, 1])
    found = advantages("algo=process", "plugins.process.eps=0", step=step)
    assert not found[:rows].any() and found[rows:, 0].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-12)


def test_rows_without_steps_or_without_a_reward_leave_the_statistics():
    step = step_of([*GROUP, [], [], [(0, 50.0)]], totals=[1.0] * 5 + [math.nan])
    vectors = [*step.rewards.vectors["steps"]]
    vectors[4] = NONE
    step = step._replace(rewards=replace(step.rewards, vectors={"steps": tuple(vectors)}))
    found = advantages("algo=process", step=step)
    assert torch.equal(found[:3], advantages("algo=process", step=step_of(GROUP)))
    assert not found[3:].any()


@pytest.mark.parametrize("empty", [torch.zeros(0, 2), torch.zeros(0, 0), NONE])
def test_a_batch_without_any_step_has_no_advantage(empty):
    step = step_of([[], []])
    step = step._replace(rewards=replace(step.rewards, vectors={"steps": (empty.double(),) * 2}))
    assert not advantages("algo=process", step=step).any()


def test_two_steps_that_end_at_one_token_add_up():
    """Rewards 1 1 0 0: mean .5, std sqrt(1/3); z = +-.5 / (.5773503 + .0001) = .8658755."""
    found = advantages("algo=process", step=step_of([[(2, 1), (2, 1)], [(2, 0), (3, 0)]]))
    assert found[0].tolist() == pytest.approx([1.7317509] * 3 + [0, 0], abs=1e-6)
    assert found[1].tolist() == pytest.approx([-1.7317509] * 3 + [-0.8658755, 0], abs=1e-6)


STEPS = st.lists(st.tuples(st.integers(0, 4), st.floats(-3, 3)), max_size=4)


@given(st.lists(st.tuples(st.integers(0, 2), STEPS), min_size=1, max_size=9), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_groups_of_any_size_in_any_order(rows, random):
    groups, steps = [group for group, _ in rows], [steps for _, steps in rows]
    step, plugin = step_of(steps, groups), Process(Process.Config())

    def advantage(step):
        return plugin.advantage(rollouts=step.rollouts, rewards=step.rewards)

    found = advantage(step)
    for group in set(groups):
        members = [row for row, other in enumerate(groups) if other == group]
        alone = advantage(select(step, members))
        torch.testing.assert_close(found[members], alone, rtol=0, atol=1e-9)
        # at the first token every step is still ahead: the sum is that of all z of the group
        assert abs(float(alone[:, 0].sum())) < 1e-6
    order = random.sample(range(len(rows)), len(rows))
    torch.testing.assert_close(advantage(select(step, order)), found[order], rtol=0, atol=1e-9)
    assert torch.equal(advantage(widen(step, 2))[:, :5], found)


def test_the_component_is_chosen_by_name():
    step, other = step_of(GROUP), step_of([[(4, 1)], [(4, 0)], [(4, 0)]])
    both = {"fine": step.rewards.vectors["steps"], "coarse": other.rewards.vectors["steps"]}
    step = step._replace(rewards=replace(step.rewards, vectors=both))
    found = advantages("algo=process", "plugins.process.component=coarse", step=step)
    assert torch.equal(found, advantages("algo=process", step=other))
    for option, shown in (([], "component=null"), (["plugins.process.component=fnie"], "component=fnie")):
        with pytest.raises(UserError, match=rf"plugins\.process\.{shown}: rewards of steps are coarse, fine"):
            advantages("algo=process", *option, step=step)


def test_without_a_reward_for_steps_it_says_what_to_add():
    with pytest.raises(UserError, match=r"none, add one: reward=\[answer,steps\]"):
        advantages("algo=process")


def test_without_a_reward_for_the_answer_no_row_would_train():
    step = step_of(GROUP)
    alone = replace(step.rewards, components={}, weights={}, total=torch.full((3,), math.nan, dtype=torch.float64))
    with pytest.raises(UserError, match=r"not trained on\nadd one: reward=\[answer,steps\]"):
        advantages("algo=process", step=step._replace(rewards=alone))


@pytest.mark.parametrize("bad", [(5, 1), (3, 1), (-1, 1), (0.5, 1), (math.nan, 1), (0, math.nan)])
def test_a_step_that_ends_nowhere_or_has_no_reward_is_an_error(bad):
    step = step_of([[(0, 1), bad], [(0, 0)]], lengths=[3, 5])
    with pytest.raises(UserError, match=r"reward 'steps' has the step .* in a completion of 3 tokens, prompt 'p0'"):
        advantages("algo=process", step=step)


def test_a_matrix_of_other_columns_is_an_error():
    step = step_of(GROUP)
    step = step._replace(rewards=replace(step.rewards, vectors={"steps": (torch.ones(1, 3).double(),) * 3}))
    with pytest.raises(UserError, match="reward 'steps' has 3 columns"):
        advantages("algo=process", step=step)


@pytest.mark.parametrize("options", [{"ddof": 2}, {"eps": -1e-3}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Process.Config(**options)


def test_conformance():
    """On the ragged example with steps at the middle and the end of each row.

    Its totals decide nothing, so checks that only change totals do not apply; a row alone compares its own steps.
    """
    step = example()
    lengths = step.rollouts.lengths.tolist()
    steps = [[(n // 2, row % 2), (n - 1, row % 3)] if n else [] for row, n in enumerate(lengths)]
    step = step._replace(rewards=replace(step.rewards, vectors={"steps": tuple(map(matrix, steps))}))
    skip = {"equal rewards", "missing rewards", "singleton"}
    assert "micro-batches" in check_plugin("process", "algo=process", skip=skip, step=step)
