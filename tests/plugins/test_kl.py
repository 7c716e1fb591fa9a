"""KL: the numbers of the sheet (grpo.md, 6.2 and 6.4), the identities by enumeration, and what is refused."""

from dataclasses import replace

import pytest
import torch
from grpozoo_plugins.kl import Estimator, Form, Kl

from grpozoo import Output, UserError
from grpozoo.testing import advantages, assemble, check_plugin, fixture, loss
from grpozoo.testing.example import TOKEN_FIELDS
from grpozoo.testing.golden import compose

REWARD = ["plugins.kl.form=reward", "plugins.kl.estimator=k1"]


def alone(*options):
    """Value and gradient of the KL term by itself: advantages 0, coef 1, mean over the 27 tokens."""
    options = [f"plugins.kl.{option}" for option in ("coef=1", *options)]
    return loss("algo=kl", "plugins.grpo.aggregation=token_mean", *options, advantages=[0.0] * 8)


@pytest.mark.parametrize(
    "options, value",
    [
        (["estimator=k1"], 0.065185),
        (["estimator=k2"], 0.021407),
        ([], 0.020954),
        (["estimator=k3_plus"], 0.020954),
        (["ratio_weighted=true"], 0.023029),
    ],
)
def test_values_of_the_worked_example(options, value):
    assert alone(*options)[0] == pytest.approx(value, abs=1e-6)


def test_gradients_of_the_worked_example():
    """k1: 1 / 27. k2, k3_plus: x / 27. k3: (1 - exp(-x)) / 27. w k3: w (k3 + 1 - exp(-x)) / 27. x = lp - lr."""
    step = fixture()
    mask, lp = step.batch.mask, step.out.logprobs.detach()
    x, w = lp - step.batch.ref_logprobs, (lp - step.batch.old_logprobs).exp()
    k3 = (-x).exp() + x - 1
    expected = {
        ("estimator=k1",): torch.ones_like(x),
        ("estimator=k2",): x,
        ("estimator=k3_plus",): x,
        ("estimator=k3",): 1 - (-x).exp(),
        ("ratio_weighted=true",): w * (k3 + 1 - (-x).exp()),
        ("ratio_weighted=true", "estimator=k1"): w * (x + 1),
    }
    for options, gradient in expected.items():
        torch.testing.assert_close(alone(*options)[1], gradient * mask / 27, rtol=0, atol=1e-12)
    row = [-0.012958, 0.005159, 0.007610, -0.001899, 0.008193]
    assert alone("estimator=k3")[1][1].tolist() == pytest.approx(row, abs=1e-6)


def test_as_a_loss_beside_grpo_it_is_grpos_own_term():
    own = loss("plugins.grpo.kl_coef=0.04")
    value, gradient = loss("algo=kl", "plugins.kl.coef=0.04")
    assert value == pytest.approx(0.020016, abs=1e-6)
    assert value == pytest.approx(own[0], abs=1e-12)
    torch.testing.assert_close(gradient, own[1], rtol=0, atol=1e-12)


def test_as_a_reward_it_is_taken_off_the_total_before_the_baseline():
    """Old minus reference is .05 (((i + t) % 3) - 1). Sums of ((i + t) % 3) - 1 over the rows of group 0 (lengths 3 5 2 4):

    -1 0 1 = 0     0 1 -1 0 1 = 1     1 -1 = 0     -1 0 1 -1 = -1
    coef 2: totals 1 - 0, 0 - .1, 0 - 0, 1 + .1; mean .5
    """
    found = advantages("algo=kl", *REWARD, "plugins.kl.coef=2", "plugins.grpo.std=none")
    assert found[:4].tolist() == pytest.approx([0.5, -0.6, -0.5, 0.6], abs=1e-12)
    value, gradient = loss("algo=kl", *REWARD, "plugins.kl.coef=2", advantages=[0.0] * 8)
    assert value == 0 and not gradient.any()  # and nothing in the loss


# Identities, by enumeration of a categorical of three: row a of a step is the token a, weighted by its probability.

THETA = torch.tensor([0.2, -0.3, 0.5], dtype=torch.float64)
REF = torch.tensor([0.0, 0.4, -0.1], dtype=torch.float64).log_softmax(0)


def divergence(logp, logq):
    return (logp.exp() * (logp - logq)).sum()


def gradient_of(function):
    theta = THETA.clone().requires_grad_()
    return torch.autograd.grad(function(theta.log_softmax(0)), theta)[0]


def expectation(old=None, **options):
    """Value, and gradient by autograd, of the loss form, in expectation over tokens of `old` (null: of the policy)."""
    theta = THETA.clone().requires_grad_()
    logp = theta.log_softmax(0)
    old = logp.detach() if old is None else old
    tables = {name: old[:, None] for name in TOKEN_FIELDS} | {"ref_logprobs": REF[:, None]}
    step = assemble([1, 1, 1], [0, 0, 0], [0.0] * 3, tables, logp.detach()[:, None])
    plugin = Kl(Kl.Config(coef=1.0, **options))
    terms = plugin.regularizer(batch=step.batch, out=Output(logp[:, None]))
    mean = (old.exp() * terms[:, 0]).sum()
    return float(mean.detach()), torch.autograd.grad(mean, theta)[0]


KL_FORWARD = [0.000679, -0.184232, 0.183553]
KL_BACKWARD = [0.043844, -0.234044, 0.190200]


def test_the_two_divergences_are_the_sheets():
    logp = THETA.log_softmax(0)
    assert float(divergence(logp, REF)) == pytest.approx(0.136817, abs=1e-6)
    assert float(divergence(REF, logp)) == pytest.approx(0.149902, abs=1e-6)
    assert gradient_of(lambda p: divergence(p, REF)).tolist() == pytest.approx(KL_FORWARD, abs=1e-6)
    assert gradient_of(lambda p: divergence(REF, p)).tolist() == pytest.approx(KL_BACKWARD, abs=1e-6)


def forward(logp):
    return divergence(logp, REF)


def backward(logp):
    return divergence(REF, logp)


@pytest.mark.parametrize(
    "options, value, target",
    [
        ({"estimator": Estimator.k1}, 0.136817, lambda logp: 0 * logp.sum()),
        ({"estimator": Estimator.k2}, 0.128974, forward),
        ({"estimator": Estimator.k3}, 0.136817, backward),
        ({"estimator": Estimator.k3_plus}, 0.136817, forward),
        ({"estimator": Estimator.k3, "ratio_weighted": True}, 0.136817, forward),
        ({"estimator": Estimator.k1, "ratio_weighted": True}, 0.136817, forward),
    ],
)
def test_what_each_estimator_is_the_gradient_of(options, value, target):
    mean, gradient = expectation(**options)
    assert mean == pytest.approx(value, abs=1e-6)
    torch.testing.assert_close(gradient, gradient_of(target), rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", [Estimator.k1, Estimator.k3])
def test_the_ratio_corrects_for_another_sampling_policy(estimator):
    old = torch.tensor([1.0, 0.0, -0.5], dtype=torch.float64).log_softmax(0)
    mean, gradient = expectation(old, estimator=estimator, ratio_weighted=True)
    assert mean == pytest.approx(float(divergence(THETA.log_softmax(0), REF)), abs=1e-12)
    torch.testing.assert_close(gradient, gradient_of(forward), rtol=0, atol=1e-12)


def test_as_a_reward_the_policy_gradient_is_minus_the_gradient_of_the_kl():
    logp = THETA.log_softmax(0)
    tables = {name: logp[:, None] for name in TOKEN_FIELDS} | {"ref_logprobs": REF[:, None]}
    step = assemble([1, 1, 1], [0, 0, 0], [0.0] * 3, tables, logp[:, None])
    plugin = Kl(Kl.Config(coef=1.0, estimator=Estimator.k1, form=Form.reward))
    reward = plugin.token_rewards(rollouts=step.rollouts)[:, 0]
    climbed = gradient_of(lambda p: (logp.exp() * reward * p).sum())  # E[reward grad logp]
    torch.testing.assert_close(climbed, -gradient_of(forward), rtol=0, atol=1e-12)
    # What k3 would do instead, and why it is refused:
    k3 = (REF - logp).exp() + logp - REF - 1
    other = gradient_of(lambda p: (logp.exp() * k3 * p).sum())
    assert other.tolist() == pytest.approx([-0.043165, 0.049812, -0.006648], abs=1e-6)


@pytest.mark.parametrize("ratio_weighted", [False, True])
def test_log_ratios_are_clamped_to_20_nats(ratio_weighted):
    """logp - ref = -50 counts as -20: k3 = e^20 - 20 - 1; and a ratio of e^-50 as e^-20."""
    step = fixture()
    out = Output(torch.full_like(step.batch.ref_logprobs, -51.0))
    batch = replace(step.batch, ref_logprobs=out.logprobs + 50, old_logprobs=out.logprobs + 50)
    term = Kl(Kl.Config(coef=1.0, ratio_weighted=ratio_weighted)).regularizer(batch=batch, out=out)
    k3 = torch.tensor(20.0, dtype=torch.float64).exp() - 21
    expected = k3 * torch.tensor(-20.0, dtype=torch.float64).exp() if ratio_weighted else k3
    torch.testing.assert_close(term, expected.expand(term.shape), rtol=1e-12, atol=0)


def test_it_logs_the_estimate_without_coef_and_ratio():
    for ratio_weighted in (False, True):
        plugin, step = Kl(Kl.Config(coef=7.0, ratio_weighted=ratio_weighted)), fixture()
        plugin.name = "kl"
        plugin.regularizer(batch=step.batch, out=step.out)
        ((name, value, weight),) = plugin.logged
        assert (name, weight) == ("kl/kl", 27.0) and value == pytest.approx(0.020954, abs=1e-6)


def test_needs_follow_the_form():
    assert Kl(Kl.Config()).needs == {"ref_logprobs", "all_rows"}
    assert Kl(Kl.Config(estimator=Estimator.k1, form=Form.reward)).needs == {"ref_logprobs", "old_logprobs"}


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_plus"])
def test_other_estimators_are_refused_as_a_reward(estimator):
    with pytest.raises(UserError, match=rf"plugins\.kl: as a reward only k1 .* {estimator} .*estimator=k1"):
        compose("algo=kl", "plugins.kl.form=reward", f"plugins.kl.estimator={estimator}")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"coef": -1.0}, "coef is at least 0"),
        ({"estimator": Estimator.k2, "ratio_weighted": True}, "k2 has its gradient without the ratio"),
        ({"estimator": Estimator.k3_plus, "ratio_weighted": True}, "k3_plus has its gradient without"),
        ({"estimator": Estimator.k1, "form": Form.reward, "ratio_weighted": True}, "ratio_weighted=false"),
    ],
)
def test_options_that_make_no_kl_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Kl.Config(**options)


def notices(*overrides):
    config, active = compose(*overrides)
    return [notice for notice in active.hooks.validate(config=config, active=active) if notice]


@pytest.mark.parametrize("form", [[], REWARD])
def test_a_second_kl_term_is_refused(form):
    with pytest.raises(UserError, match=r"plugins\.kl and plugins\.grpo\.kl_coef=0\.04 are two KL terms"):
        notices("algo=kl", "plugins.grpo.kl_coef=0.04", *form)


def test_k1_as_a_plain_loss_is_announced_as_noise():
    assert "0 in expectation" in notices("algo=kl", "plugins.kl.estimator=k1")[0]
    assert notices("algo=kl", "plugins.kl.estimator=k1", "plugins.kl.ratio_weighted=true") == []
    assert notices("algo=kl") == [] and notices("algo=kl", *REWARD) == []


@pytest.mark.parametrize("options", [[], ["plugins.kl.ratio_weighted=true"], ["plugins.kl.estimator=k3_plus"], REWARD])
def test_conformance(options):
    check_plugin("kl", "algo=kl", *options)
