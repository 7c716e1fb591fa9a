"""algo=reinforce: F1 of the method sheet (6.2), and what all surrogates share with it on-policy (section 7, item 3)."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ratio_steps import notices, on_policy, random_step, surrogate, with_advantages

from grpozoo.testing import check_plugin, compose, fixture, loss

SURROGATES = ["reinforce", "grpo", "clip_higher", "two_sided", "dual_clip", "cispo", "sapo", "gmpo", "dppo_tv"]
PLUGINS = {name: compose(f"algo={name}")[1].plugins[name] for name in SURROGATES}


@pytest.mark.parametrize("aggregation", ["seq_mean", "token_mean"])
def test_conformance(aggregation):
    check_plugin("reinforce", "algo=reinforce", f"plugins.grpo.aggregation={aggregation}")


def test_loss_and_gradient_of_the_worked_example():
    """F1, token_mean: the gradient is -A / 27, whatever the ratio."""
    value, gradient = loss("algo=reinforce", "plugins.grpo.aggregation=token_mean")
    assert value == pytest.approx(0.180169, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(0.845400, abs=1e-6)
    assert gradient[0, :3].tolist() == pytest.approx([-0.032069] * 3, abs=1e-6)
    assert gradient[1].tolist() == pytest.approx([0.032069] * 5, abs=1e-6)


@pytest.mark.parametrize("name", SURROGATES)
def test_on_policy_all_surrogates_have_one_gradient(name):
    """Through the hooks, on F1 with lp = lo, seq_mean: -A / (L_i * 8)."""
    step = on_policy(fixture())
    _, gradient = loss(f"algo={name}", step=step)
    expected = -step.batch.advantages / step.batch.lengths[:, None] / 8
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", SURROGATES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_on_policy_all_surrogates_have_one_gradient_on_random_steps(name, seed):
    step = on_policy(random_step(seed))
    _, gradient = surrogate(PLUGINS[name], step)
    torch.testing.assert_close(
        gradient, -step.batch.advantages / step.batch.lengths[:, None] / 6, rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize("name", SURROGATES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_on_policy_the_values_differ_as_they_should(name, seed):
    """-A for those that are a ratio at 1, -2 A / tau for sapo, -A logp where only the gradient has a meaning."""
    step = on_policy(random_step(seed))
    A, logprobs = step.batch.advantages, step.out.logprobs.detach()
    losses, _ = surrogate(PLUGINS[name], step)
    expected = -A
    if name == "sapo":
        expected = -2 * A / torch.full_like(A, 1.05).masked_fill(A > 0, 1.0)
    elif name in ("reinforce", "cispo", "dppo_tv"):
        expected = -A * logprobs
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", SURROGATES)
@given(seed=st.integers(0, 10_000), row=st.integers(0, 5))
@settings(max_examples=15, deadline=None)
def test_a_completion_without_advantage_has_no_loss_and_no_gradient(name, seed, row):
    step = random_step(seed, spread=3.0)
    A = step.batch.advantages.clone()
    A[row] = 0
    losses, gradient = surrogate(PLUGINS[name], with_advantages(step, A))
    assert not losses[row].any() and not gradient[row].any()
    others = [i for i in range(6) if i != row]
    before, slope = surrogate(PLUGINS[name], step)
    assert torch.equal(losses[others], before[others]) and torch.equal(gradient[others], slope[others])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("name", SURROGATES)
def test_no_gradient_arises_from_what_stands_beyond_the_mask(name, garbage):
    """0 times NaN is NaN: a masked position must have gradient 0 itself, the policy's backward adds it up."""
    step = random_step(0)
    expected = surrogate(PLUGINS[name], step)
    filled = [x.detach().masked_fill(~step.batch.mask, garbage) for x in (step.batch.old_logprobs, step.out.logprobs)]
    dirty = step._replace(batch=replace(step.batch, old_logprobs=filled[0]), out=replace(step.out, logprobs=filled[1]))
    found = surrogate(PLUGINS[name], dirty)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_several_updates_per_batch_are_announced_as_biased():
    assert notices("algo=reinforce") == []
    (notice,) = notices("algo=reinforce", "update.epochs=2", "update.mini_batches=3")
    assert "plugins.reinforce has no importance ratio: of 6 updates per batch all but the first are biased" in notice
