"""Max@k: the sheet's numbers, and that it is the gradient of the expected best of k."""

import itertools
from math import comb
from types import SimpleNamespace

import pytest
import torch
from group_steps import advantage_of, run_of
from grpozoo_plugins.max_at_k import MaxAtK
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo import UserError
from grpozoo.testing import check_plugin, compose


@pytest.mark.parametrize("options", [[], ["plugins.max_at_k.k=1"], ["plugins.max_at_k.k=3"]])
def test_conformance(options):
    assert "missing rewards" in check_plugin("max_at_k", "algo=max_at_k", *options)


def shares(r, k=None):
    return MaxAtK(MaxAtK.Config(k=k)).shares(torch.tensor(r, dtype=torch.float64)).tolist()


def test_the_worked_example():
    """n = 4, k = 2: .1: (0 + .4 + .5 + .9) / 6; .4: (.4 + .5 + .9) / 6; .5: (2 * .5 + .9) / 6; .9: 3 * .9 / 6."""
    r = [0.1, 0.5, 0.4, 0.9]
    assert shares(r) == pytest.approx([0.300000, 0.316667, 0.300000, 0.450000], abs=1e-6)
    found = advantage_of("algo=max_at_k", rewards=r).tolist()  # shares .041667, .025, .108333 off the mean, std .072648
    assert found == pytest.approx([-0.573531, -0.344119, -0.573531, 1.491182], abs=1e-6)


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=7), st.data())
@settings(max_examples=60, deadline=None)
def test_a_share_is_the_sum_of_the_maxima_of_the_subsets_that_hold_it(r, data):
    k = data.draw(st.integers(1, len(r) - 1))
    subsets = list(itertools.combinations(range(len(r)), k))
    expected = [sum(max(r[j] for j in s) for s in subsets if i in s) / comb(len(r), k) for i in range(len(r))]
    assert shares([float(x) for x in r], k) == pytest.approx(expected, abs=1e-9)


def test_its_expectation_is_the_gradient_of_best_at_k():
    """Bernoulli rewards, theta = logit of p, n = 4, k = 2: d/d theta [1 - (1 - p)^2] = 2 (1 - p) p (1 - p)."""
    p, n, k, expected = 0.3, 4, 2, 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=n):
        chance = p ** sum(outcome) * (1 - p) ** (n - sum(outcome))
        expected += chance * sum(a * (x - p) for a, x in zip(shares(outcome, k), outcome, strict=True))
    assert expected == pytest.approx(k * (1 - p) ** k * p, abs=1e-12)


def test_the_default_k_is_half_of_the_group_and_2_at_least():
    r = [0.0, 1.0, 2.0, 3.0, 5.0, 8.0]
    assert shares(r) == shares(r, 3) and shares(r[:3]) == shares(r[:3], 2)
    assert shares(r[:2], 5) == shares(r[:2], 1) and shares([4.0]) == [4.0]  # rows without a reward left


def test_ties_have_one_advantage_whatever_their_order():
    A = advantage_of("algo=max_at_k", rewards=[0.5, 1, 0.5, 0, 1]).tolist()  # below rank k all are alike
    assert A[0] == pytest.approx(A[2], abs=1e-12) and A[1] == pytest.approx(A[4], abs=1e-12) and A[0] < A[1]
    assert advantage_of("algo=max_at_k", "plugins.max_at_k.eps=0", rewards=[0.1] * 7).tolist() == [0.0] * 7


def test_k_of_one_is_grpo_up_to_eps():
    """a_i = r_i / n."""
    r = [0.1, 0.5, 0.4, 0.9]
    found = advantage_of("algo=max_at_k", "plugins.max_at_k.k=1", "plugins.max_at_k.eps=0", rewards=r)
    assert found.tolist() == pytest.approx(advantage_of("plugins.grpo.eps=0", rewards=r).tolist(), abs=1e-9)
    config, active = compose("algo=max_at_k", "plugins.max_at_k.k=1")
    assert any("k=1" in text for text in active.hooks.validate(config=config, active=active) if text)


@pytest.mark.parametrize("overrides", [["plugins.max_at_k.k=8"], ["group_size=2"]])
def test_k_leaves_a_choice(overrides):
    config, active = compose("algo=max_at_k", *overrides)
    with pytest.raises(UserError, match="leaves no choice among group_size="):
        active.hooks.validate(config=config, active=active)


def test_a_sampler_that_couples_siblings_is_refused():
    run = run_of("algo=max_at_k")  # the independent one passes
    coupled = SimpleNamespace(token_sampler=lambda run: SimpleNamespace(independent=False))
    with pytest.raises(UserError, match="couples the completions"):
        run.plugins["max_at_k"].setup(run=SimpleNamespace(hooks=coupled))


@pytest.mark.parametrize("options", [{"k": 0}, {"eps": -1e-3}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        MaxAtK.Config(**options)
