"""algo=steer: weights worked by hand, their bounds and invariances."""

import math
from dataclasses import replace

import pytest
import torch
from grpozoo_plugins.steer import Steer
from hypothesis import given, settings
from hypothesis import strategies as st
from two_groups import ADVANTAGES, DAPO, LOG_RATIOS, TOKENS, places, two_groups

from grpozoo import Output
from grpozoo.testing import check_plugin, loss
from grpozoo.testing.example import garble, select, widen


def weights(step=None, **options):
    """The table of a step, and the plugin."""
    plugin = Steer(Steer.Config(**options))
    plugin.name = "steer"
    step = step or two_groups()
    out = Output(step.out.logprobs.detach(), step.out.entropy.detach())
    return plugin.minibatch(batch=step.batch, out=out)["steer/weights"], plugin


@pytest.mark.parametrize("options", [(), ("plugins.steer.floor=100",)])
def test_conformance(options):
    check_plugin("steer", "algo=steer", *options)


def test_two_tokens_by_hand():
    """p = p_old = 1/2, H = 1, A = 1: f = 1/4 (1 - log 2) = 0.076713, O = 2 f = 0.153426, the largest: weight w_min.

    p = 1/4, p_old = 1/2, H = 2, A = -1/2: f = 3/16 (2 - log 4) = 0.115070, O = f = 0.115070,
    k = -log 0.8 / 0.153426 = 1.454401, weight exp(-1.454401 * 0.115070) = 0.845897.
    """
    step = two_groups()
    tensors = {
        "advantages": torch.tensor([[1.0, -0.5]], dtype=torch.float64),
        "mask": torch.ones(1, 2, dtype=torch.bool),
        "old_logprobs": torch.tensor([[0.5, 0.5]], dtype=torch.float64).log(),
    }
    out = Output(torch.tensor([[0.5, 0.25]], dtype=torch.float64).log(), torch.tensor([[1.0, 2.0]]))
    found, plugin = weights(step._replace(batch=replace(step.batch, **tensors), out=out))
    assert found[0].tolist() == pytest.approx([0.8, 0.845897], abs=1e-6)
    assert dict((name, value) for name, value, _ in plugin.logged) == {
        "steer/weight": pytest.approx((0.8 + 0.845897) / 2, abs=1e-6),
        "steer/max_change": pytest.approx(0.153426, abs=1e-6),
    }


def by_hand(step, w_min=0.8, floor=0.02):
    """The weights of the worked batch, token by token."""
    change = {}
    for row, token in places(step.batch.mask):
        logp, H = step.out.logprobs[row, token].item(), step.out.entropy[row, token].item()
        p, p_old = math.exp(logp), math.exp(logp - LOG_RATIOS.get((row, token), 0.0))
        change[row, token] = abs(ADVANTAGES[row] / p_old * p * (1 - p) * (logp + H))
    k = -math.log(w_min) / max(*change.values(), floor)
    return {place: math.exp(-k * size) for place, size in change.items()}


@pytest.mark.parametrize("options", [{}, {"w_min": 0.3}, {"floor": 5.0}])
def test_weights_and_gradient_of_the_worked_batch(options):
    step = two_groups()
    expected, (found, _) = by_hand(step, **options), weights(**options)
    assert {place: found[place].item() for place in expected} == {p: pytest.approx(w) for p, w in expected.items()}
    _, plain = loss(*DAPO, step=step)
    named = (f"plugins.steer.{name}={value}" for name, value in options.items())
    _, gradient = loss("algo=steer", *named, *DAPO, step=step)
    torch.testing.assert_close(gradient, plain * found, rtol=0, atol=1e-6)  # grpo.eps and the table of ADVANTAGES
    assert (gradient != plain).sum() >= TOKENS - 4  # three tokens are held by the clip


def test_loss_of_the_worked_batch():
    """sum w max(-A ratio, -A clip(ratio, 0.8, 1.28)) / 34, the weights as above."""
    step, total = two_groups(), 0.0
    for (row, token), weight in by_hand(step).items():
        A, ratio = ADVANTAGES[row], math.exp(LOG_RATIOS.get((row, token), 0.0))
        total += weight * max(-A * ratio, -A * min(max(ratio, 0.8), 1.28))
    assert loss("algo=steer", *DAPO, step=step)[0] == pytest.approx(total / TOKENS, abs=1e-6)


@given(st.floats(0.05, 1), st.floats(1e-3, 10), st.floats(-5, 5))
@settings(max_examples=50, deadline=None)
def test_weights_lie_between_w_min_and_1(w_min, floor, scale):
    step = two_groups()
    step = step._replace(batch=replace(step.batch, advantages=scale * step.batch.advantages))
    found, _ = weights(step, w_min=w_min, floor=floor)
    assert found.min() >= w_min
    assert found.max() <= 1


@given(st.floats(0.5, 20))
@settings(max_examples=30, deadline=None)
def test_the_size_of_advantages_does_not_matter_above_the_floor(scale):
    """The largest change always weighs w_min."""
    step = two_groups()
    scaled = step._replace(batch=replace(step.batch, advantages=scale * step.batch.advantages))
    torch.testing.assert_close(weights(scaled)[0], weights()[0], rtol=0, atol=1e-12)


def test_below_the_floor_weights_go_to_1():
    """Largest change m < floor: its weight is w_min^(m / floor)."""
    step = two_groups()
    small = step._replace(batch=replace(step.batch, advantages=1e-3 * step.batch.advantages))
    found, plugin = weights(small)
    largest = plugin.logged[1][1]
    assert largest < 0.02
    assert found.min().item() == pytest.approx(0.8 ** (largest / 0.02), abs=1e-9)


def test_w_min_one_is_grpo():
    plain, found = (loss(*algo, *DAPO, step=two_groups()) for algo in ((), ("algo=steer", "plugins.steer.w_min=1")))
    assert found[0] == plain[0]
    assert torch.equal(found[1], plain[1])


@pytest.mark.parametrize("w_min", [0.08, 0.09, 0.16, 0.35])
def test_rounding_does_not_take_a_weight_below_w_min(w_min):
    """exp(-k O) of the largest change is an ulp below each of these."""
    assert weights(w_min=w_min)[0].min().item() == w_min


def test_certain_and_impossible_tokens_have_finite_weights():
    """Log-probabilities 0 and -1000 count as 1 - 1e-8 and 1e-8, so that O = |A (1 - p) (log p + H)| is finite."""
    step = two_groups()
    logp = step.out.logprobs.detach().clone()
    logp[0, 0], logp[1, 0] = 0.0, -1000.0
    step = step._replace(batch=replace(step.batch, old_logprobs=logp), out=replace(step.out, logprobs=logp))
    found, plugin = weights(step)
    assert found.isfinite().all()
    impossible = 0.866024 * (1 - 1e-8) * abs(math.log(1e-8) + 0.90)  # 15.17, the largest by far
    assert plugin.logged[1][1] == pytest.approx(impossible, abs=1e-6)


@given(st.permutations(range(8)), st.integers(0, 3), st.sampled_from([float("nan"), float("inf"), -float("inf")]))
@settings(max_examples=40, deadline=None)
def test_row_order_padding_and_masked_numbers_change_no_weight(order, columns, garbage):
    found, _ = weights(garble(widen(select(two_groups(), order), columns), garbage))
    mask = two_groups().batch.mask[order]
    assert torch.equal(found[:, :5][mask], weights()[0][order][mask])
    assert (found[:, 5:] == 1).all()


@pytest.mark.parametrize("options, message", [({"w_min": 0.0}, "w_min"), ({"w_min": 1.1}, "w_min"), ({"floor": 0.0}, "floor")])  # fmt: skip
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Steer.Config(**options)
