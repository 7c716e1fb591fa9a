"""pass@k: numbers by hand on the worked example, and that its plain form is the leave-one-out form of the maximum."""

import itertools

import pytest
from group_steps import advantage_of, step_of
from grpozoo_plugins.passk import Passk
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo.testing import advantages, check_plugin

PLAIN = ("algo=passk", "plugins.passk.std=false")


@pytest.mark.parametrize("options", [[], ["plugins.passk.std=false"]])
def test_conformance(options):
    check_plugin("passk", "algo=passk", *options)


@pytest.mark.parametrize(
    "options, expected",
    [
        ([], 1.044464),  # .5 / (sqrt(.6875 / 3) + 1e-6): squares .140625 * 2 + .015625 + .390625 = .6875
        (["plugins.passk.std=false"], 0.5),
        (["plugins.passk.eps=1"], 0.338132),  # .5 / 1.478714
    ],
)
def test_advantages_of_the_worked_example(options, expected):
    """Group 0 has two best rows; in group 1 row 6 is best by .5."""
    found = advantages("algo=passk", *options).tolist()
    assert found == pytest.approx([0, 0, 0, 0, 0, 0, expected, 0], abs=1e-6)
    assert [row for row, A in enumerate(found) if A] == [6]  # all others exactly 0


@given(st.lists(st.tuples(st.integers(0, 2), st.one_of(st.none(), st.integers(-4, 4))), min_size=1, max_size=16))
@settings(max_examples=60, deadline=None)
def test_it_is_the_maximum_less_the_maximum_of_the_others(rows):
    groups, rewards = [group for group, _ in rows], [reward for _, reward in rows]
    found = advantage_of(*PLAIN, rewards=rewards, groups=groups).tolist()
    for i, (group, reward) in enumerate(rows):
        others = [r for j, (g, r) in enumerate(rows) if g == group and r is not None and j != i]
        expected = 0 if reward is None or not others else max(reward, *others) - max(others)
        assert found[i] == expected


def test_its_expectation_is_the_gradient_of_pass_at_k():
    """Bernoulli completions, theta = logit of p: all 2^4 groups. d/d theta [1 - (1 - p)^4] = 4 (1 - p)^4 p."""
    p, k, expected = 0.3, 4, 0.0
    for outcome in itertools.product([0, 1], repeat=k):
        chance = p ** sum(outcome) * (1 - p) ** (k - sum(outcome))
        A = advantage_of(*PLAIN, rewards=outcome).tolist()
        expected += chance * sum(a * (x - p) for a, x in zip(A, outcome, strict=True))  # d log P(x) / d theta = x - p
    assert expected == pytest.approx(k * (1 - p) ** k * p, abs=1e-12)


def test_the_share_of_groups_with_a_lone_best_is_logged():
    plugin = Passk(Passk.Config())
    plugin.name = "passk"
    step = step_of([1, 0, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2])
    plugin.advantage(rollouts=step.rollouts, rewards=step.rewards)
    assert plugin.logged == [("passk/lone_best", pytest.approx(1 / 3), 3.0)]


def test_an_epsilon_below_zero_is_refused():
    with pytest.raises(ValueError, match="eps"):
        Passk.Config(eps=-1e-3)
