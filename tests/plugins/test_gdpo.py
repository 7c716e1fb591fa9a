"""GDPO: components normalised one by one, against plain Python; and totals that it cannot read are refused."""

import math
from dataclasses import replace
from statistics import mean, stdev

import pytest
import torch
from group_steps import advantage_of, step_of
from grpozoo_plugins.gdpo import Gdpo
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo import UserError
from grpozoo.ops import weighted_total
from grpozoo.testing import advantages, compose

EPS = 1e-4
NUMBER = st.one_of(st.none(), st.integers(-3, 3))


def test_advantages_of_the_worked_example():
    """One component: GRPO's advantages over their std 0.925643 (+ 1e-4): squares 2.998960 + 2.998716, over 7."""
    grpo = [0.865875, -0.865875, -0.865875, 0.865875, -0.783186, 0.261062, 1.305310, -0.783186]
    assert advantages("algo=gdpo").tolist() == pytest.approx([a / (0.925643 + EPS) for a in grpo], abs=2e-6)


def of_components(weights, columns, groups):
    """A step whose total is the weighted sum of the components."""
    components = {
        name: torch.tensor([math.nan if x is None else x for x in column], dtype=torch.float64)
        for name, column in columns.items()
    }
    total = weighted_total(components, weights)
    return step_of(total.tolist(), groups, components=components, weights=weights, total=total)


def test_components_count_alike_whatever_their_scale():
    """Two components of the same shape and of scales 1 and 100; the total would be ruled by the second.

    A group of [1, 0, 0] and [0, 100, 0]: z = 2/3 / .577350 = 1.154700 and -.577350, S = .577350, .577350, -1.154700,
    std of S = sqrt(2 / 2) = 1.
    """
    step = of_components({"a": 1.0, "b": 1.0}, {"a": [1, 0, 0], "b": [0, 100, 0]}, [0] * 3)
    found = advantage_of("algo=gdpo", "plugins.gdpo.eps=0", step=step).tolist()
    assert found == pytest.approx([0.577350, 0.577350, -1.154701], abs=1e-6)


@given(
    st.lists(st.tuples(st.integers(0, 2), NUMBER, NUMBER), min_size=1, max_size=14), st.sampled_from([0.0, 0.5, 2.0])
)
@settings(max_examples=80, deadline=None)
def test_z_scores_weights_and_batch_in_plain_python(rows, weight):
    groups, a, b = (list(column) for column in zip(*rows, strict=True))
    weights = {"a": 1.0, "b": weight}
    S = [0.0] * len(rows)
    for name, column in (("a", a), ("b", b)):
        for i, x in enumerate(column):
            group = [y for y, g in zip(column, groups, strict=True) if g == groups[i] and y is not None]
            if x is not None and len(set(group)) > 1:
                S[i] += weights[name] * (x - mean(group)) / (stdev(group) + EPS)
    kept = [i for i in range(len(rows)) if a[i] is not None or (weight and b[i] is not None)]
    scale = stdev([S[i] for i in kept]) + EPS if len(kept) > 1 else 1.0
    expected = [S[i] / scale if i in kept else 0.0 for i in range(len(rows))]
    found = advantage_of("algo=gdpo", step=of_components(weights, {"a": a, "b": b}, groups)).tolist()
    assert found == pytest.approx(expected, abs=1e-9)
    for group in set(groups):
        assert sum(A for A, g in zip(found, groups, strict=True) if g == group) == pytest.approx(0, abs=1e-9)


def test_a_component_that_is_equal_in_the_group_adds_exactly_nothing():
    with_it = of_components({"a": 1.0, "b": 1.0}, {"a": [1, 0, 0], "b": [0.1, 0.1, 0.1]}, [0] * 3)
    without = of_components({"a": 1.0}, {"a": [1, 0, 0]}, [0] * 3)
    assert advantage_of("algo=gdpo", step=with_it).tolist() == advantage_of("algo=gdpo", step=without).tolist()
    nothing = of_components({"a": 1.0, "b": 1.0}, {"a": [0.7] * 3, "b": [0.1] * 3}, [0] * 3)
    assert advantage_of("algo=gdpo", "plugins.gdpo.eps=0", step=nothing).tolist() == [0.0] * 3


def test_token_rewards_are_refused():
    step = step_of([1, 0], tokens=torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(UserError, match="token rewards do not go with"):
        advantage_of("algo=gdpo", step=step)


def test_a_total_that_was_reshaped_is_refused():
    step = step_of([1, 0, None])
    changed = step._replace(rewards=replace(step.rewards, total=step.rewards.total / 2))
    with pytest.raises(UserError, match="transform_rewards"):
        advantage_of("algo=gdpo", step=changed)


def test_a_plugin_that_is_known_to_reshape_the_total_is_refused_at_once():
    with pytest.raises(UserError, match="gdpo does not stack with long2short"):
        compose("algo=[gdpo,long2short]")


def test_an_epsilon_below_zero_is_refused():
    with pytest.raises(ValueError, match="eps"):
        Gdpo.Config(eps=-1e-3)
