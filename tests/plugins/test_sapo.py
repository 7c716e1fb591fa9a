"""algo=sapo: F1 of the method sheet (6.2), and the shape of the gate."""

import math

import pytest
import torch
from grpozoo_plugins.sapo import Sapo
from hypothesis import given, settings
from hypothesis import strategies as st
from ratio_steps import logged, notices, on_policy, random_step, surrogate

from grpozoo.testing import check_plugin, fixture, loss


@pytest.mark.parametrize("aggregation", ["seq_mean", "token_mean"])
def test_conformance(aggregation):
    check_plugin("sapo", "algo=sapo", f"plugins.grpo.aggregation={aggregation}")


def test_loss_and_gradient_of_the_worked_example():
    """F1, tau 1.0 / 1.05, seq_mean."""
    value, gradient = loss("algo=sapo")
    assert value == pytest.approx(-0.039333, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(0.895865, abs=1e-6)
    assert gradient[0, :3].tolist() == pytest.approx([-0.037903, -0.045403, -0.032571], abs=1e-6)
    assert gradient[1].tolist() == pytest.approx([0.015743, 0.023851, 0.027833, 0.020578, 0.026086], abs=1e-6)


@given(st.integers(0, 10_000), st.floats(0.2, 4), st.floats(0.2, 4))
@settings(max_examples=40, deadline=None)
def test_the_gradient_is_the_unclipped_one_times_sech_squared(seed, tau_pos, tau_neg):
    step = random_step(seed)
    _, gradient = surrogate(Sapo(Sapo.Config(tau_pos=tau_pos, tau_neg=tau_neg)), step)
    batch, w = step.batch, (step.out.logprobs.detach() - step.batch.old_logprobs).exp()
    tau = torch.full_like(w, tau_neg).masked_fill(batch.advantages > 0, tau_pos)
    expected = -w * batch.advantages / torch.cosh(tau * (w - 1) / 2) ** 2 / batch.lengths[:, None] / 6
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_the_gate_is_logged():
    """F1: the mean of sech^2 over the 27 tokens; 1 where nothing has moved."""
    step = fixture()
    moved = (step.out.logprobs.detach() - step.batch.old_logprobs)[step.batch.mask].tolist()
    taus = [1.0 if A > 0 else 1.05 for A in step.batch.advantages[step.batch.mask].tolist()]
    gates = [1 / math.cosh(tau * math.expm1(x) / 2) ** 2 for x, tau in zip(moved, taus, strict=True)]
    assert logged("sapo") == pytest.approx({"gate": sum(gates) / 27}, abs=1e-7)
    assert logged("sapo", step=on_policy(step)) == {"gate": 1.0}


def test_one_update_per_batch_is_announced_as_without_effect():
    assert "plugins.sapo changes nothing with one update per batch" in notices("algo=sapo")[0]
    assert notices("algo=sapo", "update.mini_batches=2") == []


@pytest.mark.parametrize("name", ["tau_pos", "tau_neg"])
def test_options_out_of_range_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is above 0, got 0.0"):
        Sapo.Config(**{name: 0.0})
