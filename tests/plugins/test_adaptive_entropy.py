"""algo=adaptive_entropy: the controller's worked sequence, its state, and what it does to the loss."""

import math
from types import SimpleNamespace

import pytest
import torch
from grpozoo_plugins.adaptive_entropy import AdaptiveEntropy
from hypothesis import given
from hypothesis import strategies as st
from two_groups import GRPO, two_groups

from grpozoo.testing import check_plugin, loss

WORKED = {"delta": 1e-3, "coef_max": 5e-3, "target": 0.2}


def controller(**options):
    return AdaptiveEntropy(AdaptiveEntropy.Config(**options))


def before(plugin, *entropies):
    """One completion with these entropies; what stands beside it is padding."""
    entropy = torch.tensor([[*entropies, math.nan]])
    mask = torch.tensor([[True] * len(entropies) + [False]])
    plugin.before_update(rollouts=SimpleNamespace(entropy=entropy, completion_mask=mask))


def step(plugin, *entropies):
    before(plugin, *entropies)
    plugin.after_step()
    return round(plugin.coef, 12), plugin.enabled


def test_conformance():
    check_plugin("adaptive_entropy", "algo=adaptive_entropy", "plugins.adaptive_entropy.init=0.001")


def test_the_worked_sequence():
    plugin = controller(**WORKED)
    assert (plugin.coef, plugin.enabled) == (0.0, True)
    seen = [step(plugin, h) for h in (0.25, 0.15, 0.10, 0.22, 0.18)]
    assert seen == [(0.0, False), (0.001, True), (0.002, True), (0.001, False), (0.002, True)]


def test_the_coefficient_stays_between_its_bounds():
    plugin = controller(init=0.004, coef_min=0.003, coef_max=0.005, delta=7e-4)
    assert [step(plugin, 0.0)[0] for _ in range(3)] == [0.0047, 0.005, 0.005]
    assert [step(plugin, 1.0)[0] for _ in range(4)] == [0.0043, 0.0036, 0.003, 0.003]


def test_an_entropy_at_the_target_is_not_below_it():
    plugin = controller(init=0.002, delta=1e-3, target=0.25)
    assert step(plugin, 0.25) == (0.001, False)  # 0.25 is exact in float32


def test_the_mean_is_over_tokens():
    plugin = controller(**WORKED)
    assert step(plugin, 0.125, 0.125, 0.5) == (0.0, False)  # mean 0.25
    assert step(plugin, 0.125, 0.125, 0.25) == (0.001, True)  # mean 1/6


@pytest.mark.parametrize("entropies", [(), (math.nan,), (0.1, math.nan)])
def test_a_step_without_an_entropy_decides_nothing(entropies):
    plugin = controller(**WORKED)
    step(plugin, 0.1)
    assert step(plugin, *entropies) == (0.001, True)
    step(plugin, 0.3)
    assert step(plugin, *entropies) == (0.0, False)


def test_a_decision_acts_on_the_next_step():
    """What is logged is what the step uses."""
    plugin = controller(**WORKED)
    plugin.name = "adaptive_entropy"
    step(plugin, 0.1)
    plugin.logged.clear()
    step(plugin, 0.3)
    assert [(name, round(value, 6)) for name, value, _ in plugin.logged] == [
        ("adaptive_entropy/coef", 0.001),
        ("adaptive_entropy/enabled", 1.0),
        ("adaptive_entropy/entropy", 0.3),
    ]


@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0, 1))
def test_a_stop_within_a_step_changes_nothing(history, h):
    """The state is saved between before_update and after_step: the resumed controller decides what this one decides."""
    one, other = controller(**WORKED), controller(**WORKED)
    for entropy in history:
        step(one, entropy)
    before(one, h)
    other.load_state_dict(one.state_dict())
    for plugin in (one, other):
        plugin.after_step()
    assert other.state_dict() == one.state_dict()


def test_an_empty_state_keeps_the_start():
    plugin = controller(init=0.001)
    plugin.load_state_dict({})
    assert plugin.state_dict() == {"coef": 0.001, "enabled": True, "entropy": None}


def test_loss_of_the_worked_batch():
    """-0.046814 - 0.004 * 0.558824 = -0.049049; at a coefficient of 0 it is GRPO, bit for bit."""
    worked = two_groups()
    plain = loss(*GRPO, step=worked)
    start = loss("algo=adaptive_entropy", *GRPO, step=worked)
    assert start[0] == plain[0]
    assert torch.equal(start[1], plain[1])
    found, _ = loss("algo=adaptive_entropy", "plugins.adaptive_entropy.init=0.004", *GRPO, step=worked)
    assert found == pytest.approx(-0.049049, abs=1e-6)


def test_its_mean_is_over_tokens_under_every_aggregation():
    worked, how = two_groups(), "plugins.grpo.aggregation=seq_sum"
    found, _ = loss("algo=adaptive_entropy", "plugins.adaptive_entropy.init=0.005", how, step=worked)
    assert found - loss(how, step=worked)[0] == pytest.approx(-0.005 * 19 / 34, abs=1e-9)


def test_no_term_while_it_is_off():
    plugin = controller(init=0.005)
    out = SimpleNamespace(entropy=torch.ones(1, 1))
    assert plugin.regularizer(out=out)[0].item() == pytest.approx(-0.005)
    step(plugin, 0.3)
    assert plugin.regularizer(out=out) is None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"coef_min": -1.0}, "0 <= coef_min <= coef_max"),
        ({"coef_min": 0.1}, "0 <= coef_min <= coef_max"),
        ({"init": 0.1}, r"init lies in \[0.0, 0.005\], got 0.1"),
        ({"delta": -1e-4}, "delta is at least 0"),
        ({"target": math.nan}, "target is at least 0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveEntropy.Config(**options)
