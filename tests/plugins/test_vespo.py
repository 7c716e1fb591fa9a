"""VESPO: the soft weight phi of the whole ratio, and the score that it multiplies."""

import math

import pytest
import torch
from grpozoo_plugins.vespo import Vespo

from grpozoo.testing import advantages, compose, fixture, loss
from grpozoo.types import Output

POSITIVE = [0.767814, 0.729205, 0.388227, 0.830687, 0.914058, 0.793222, 0.262689, 1.154662]  # k, lambda = 2, 3
NEGATIVE = [1.170223, 1.188628, 1.224530, 1.134658, 1.076189, 1.156693, 1.152743, 0.788627]  # 3, 2


@pytest.mark.parametrize("sign, phi", [(1.0, POSITIVE), (-1.0, NEGATIVE)])
def test_phi_of_the_worked_example(sign, phi):
    """W = 1.221403 1.258600 1.648721 1.161834 1.083287 1.197217 1.858928 .818731; the gradient is -phi A / 27."""
    step = fixture()
    value, gradient = loss("algo=vespo", advantages=[sign] * 8)
    assert (-27 * sign * gradient[:, 0]).tolist() == pytest.approx(phi, abs=1e-6)
    torch.testing.assert_close(gradient, gradient[:, :1] * step.batch.mask, rtol=0, atol=1e-15)
    by_hand = -sign * sum(p * float(lp.sum()) for p, lp in zip(phi, step.out.logprobs.detach(), strict=True)) / 27
    assert value == pytest.approx(by_hand, abs=1e-5)  # phi has six digits


def test_the_sign_of_the_advantage_chooses_the_pair():
    A = advantages()
    _, gradient = loss("algo=vespo")
    expected = [-(p if a >= 0 else n) * a / 27 for p, n, a in zip(POSITIVE, NEGATIVE, A.tolist(), strict=True)]
    assert gradient[:, 0].tolist() == pytest.approx(expected, abs=1e-6)


def test_options_are_the_powers_and_decays():
    """Row 0, W = 1.221403: W^1 exp(0.5 (1 - W)) = 1.093407; row 1 with A < 0, W = 1.2586: W^0 exp(1 - W) = 0.772132."""
    options = [f"plugins.vespo.{key}" for key in ("k_pos=1", "lambda_pos=0.5", "k_neg=0", "lambda_neg=1")]
    _, gradient = loss("algo=vespo", *options, advantages=[1.0, -1.0] + [0.0] * 6)
    assert (27 * gradient[:2, 0]).tolist() == pytest.approx([-1.093407, 0.772132], abs=1e-6)


def test_at_the_first_update_it_is_reinforce():
    """phi(1) = 1: gradient -A / 27."""
    step = fixture()
    step = step._replace(out=Output(step.rollouts.old_logprobs.clone().requires_grad_()))
    _, gradient = loss("algo=vespo", step=step)
    expected = -advantages()[:, None] * step.batch.mask / 27
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "change, phi",
    [
        (-100.0, math.exp(-2 * 18.42 + 3 * (1 - math.exp(-18.42)))),  # W clamped to e^-18.42, W^2 exp(3 (1 - W))
        (100.0, 0.0),  # W clamped to e^20, exp(-3 e^20)
    ],
)
def test_extreme_ratios_are_clamped(change, phi):
    step = fixture()
    step = step._replace(out=Output((step.rollouts.old_logprobs + change * step.batch.mask).requires_grad_()))
    _, gradient = loss("algo=vespo", step=step, advantages=[1.0] * 8)
    assert (-27 * gradient[:, 0]).tolist() == pytest.approx([phi] * 8, rel=1e-9, abs=1e-30)


def test_without_decay_the_clamp_is_the_bound():
    """lambda = 0, k = 1: phi = W, at most e^20 = 485165195.41."""
    step = fixture()
    step = step._replace(out=Output((step.rollouts.old_logprobs + 100.0 * step.batch.mask).requires_grad_()))
    options = ("plugins.vespo.k_pos=1", "plugins.vespo.lambda_pos=0")
    _, gradient = loss("algo=vespo", *options, step=step, advantages=[1.0] * 8)
    assert (-27 * gradient[:, 0]).tolist() == pytest.approx([math.exp(20)] * 8, rel=1e-12)


def test_one_update_per_batch_is_noticed():
    for overrides, expected in (((), 1), (("update.mini_batches=4",), 0)):
        config, active = compose("algo=vespo", *overrides)
        notices = [notice for notice in active.hooks.validate(config=config, active=active) if notice]
        assert len(notices) == expected and all("REINFORCE" in notice for notice in notices)


@pytest.mark.parametrize("name", ["k_pos", "lambda_pos", "k_neg", "lambda_neg"])
def test_options_out_of_range_are_refused(name):
    with pytest.raises(ValueError, match=name):
        Vespo.Config(**{name: -0.1})
