"""algo=dppo_tv: six tokens worked by hand; no published numbers are known for fixture F1."""

import math

import pytest
import torch
from grpozoo_plugins.dppo_tv import DppoTv
from hypothesis import given, settings
from hypothesis import strategies as st
from ratio_steps import notices, random_step, surrogate, with_advantages

from grpozoo.testing import assemble, check_plugin


@pytest.mark.parametrize("aggregation", ["seq_mean", "token_mean"])
def test_conformance(aggregation):
    check_plugin("dppo_tv", "algo=dppo_tv", f"plugins.grpo.aggregation={aggregation}")


def six_tokens():
    """Row 0 has A = 2, row 1 has A = -1."""
    old = torch.tensor([[0.5, 0.5, 0.001], [0.5, 0.5, 0.3]], dtype=torch.float64).log()
    now = torch.tensor([[0.75, 0.65, 0.1], [0.25, 0.35, 0.6]], dtype=torch.float64).log()
    tables = {"logprobs": old, "old_logprobs": old, "ref_logprobs": old, "entropy": -old}
    step = assemble([3, 3], [0, 0], [1.0, 0.0], tables, now)
    return with_advantages(step, torch.tensor([[2.0], [-1.0]], dtype=torch.float64))


def test_six_tokens_by_hand():
    """.5 -> .75 rose by more than .2 with A > 0: dropped, although its ratio is 1.5; .5 -> .65 stays with weight 1.3;

    .001 -> .1 stays although its ratio is 100, with weight 20. .5 -> .25 fell too far with A < 0: dropped;
    .5 -> .35 has weight .7, .3 -> .6 rises with A < 0 and has weight 2. Gradient -weight A / (3 tokens * 2 rows).
    """
    losses, gradient = surrogate(DppoTv(DppoTv.Config()), six_tokens())
    expected = [0, -2.6 / 6, -40 / 6, 0, 0.7 / 6, 2 / 6]
    assert gradient.flatten().tolist() == pytest.approx(expected, abs=1e-12)
    logs = [math.log(p) for p in (0.75, 0.65, 0.1, 0.25, 0.35, 0.6)]
    by_hand = [6 * g * log for g, log in zip(expected, logs, strict=True)]
    assert losses.flatten().tolist() == pytest.approx(by_hand, abs=1e-12)


@pytest.mark.parametrize("options, kept", [({"eps_high": 0.3}, (0, 0)), ({"eps_low": 0.3}, (1, 0))])
def test_each_end_of_the_region_has_its_own_width(options, kept):
    _, gradient = surrogate(DppoTv(DppoTv.Config(**options)), six_tokens())
    assert [bool(gradient[0, 0]), bool(gradient[1, 0])] == [kept[0] == 0, kept[0] == 1]


def test_shares():
    """Two of six tokens are dropped, one ratio is above 20."""
    plugin, step = DppoTv(DppoTv.Config()), six_tokens()
    plugin.policy_loss(batch=step.batch, out=step.out)
    assert [(name, weight) for name, _, weight in plugin.logged] == [("/dropped", 6), ("/ratio_capped", 6)]
    assert [value for _, value, _ in plugin.logged] == pytest.approx([2 / 6, 1 / 6], abs=1e-7)


def test_tokens_without_advantage_are_not_counted_as_dropped():
    plugin, step = DppoTv(DppoTv.Config()), with_advantages(six_tokens(), torch.zeros(2, 1, dtype=torch.float64))
    plugin.policy_loss(batch=step.batch, out=step.out)
    assert plugin.logged[0][:2] == ("/dropped", 0.0)


@given(st.integers(0, 10_000), st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_only_tokens_that_left_the_region_in_the_direction_of_their_advantage_are_dropped(seed, eps):
    step = random_step(seed)
    _, gradient = surrogate(DppoTv(DppoTv.Config(eps_low=eps, eps_high=eps)), step)
    moved = step.out.logprobs.detach().exp() - step.batch.old_logprobs.exp()
    left = moved * step.batch.advantages.sign() > eps
    assert torch.equal(gradient == 0, left | ~step.batch.mask)


def test_one_update_per_batch_is_announced_as_without_effect():
    assert "plugins.dppo_tv changes nothing with one update per batch" in notices("algo=dppo_tv")[0]
    assert notices("algo=dppo_tv", "update.epochs=2") == []


@pytest.mark.parametrize(
    "options, message",
    [
        ({"eps_low": -0.1}, "eps_low is a difference of probabilities, 0 to 1, got -0.1"),
        ({"eps_high": 1.1}, "eps_high is a difference of probabilities, 0 to 1, got 1.1"),
        ({"c": 0.5}, "c is at least 1, got 0.5"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DppoTv.Config(**options)
