"""algo=dual_clip: F1 of the method sheet (6.2), and its equality with two_sided (section 7, item 4)."""

import pytest
import torch
from grpozoo_plugins.dual_clip import DualClip
from grpozoo_plugins.two_sided import TwoSided
from hypothesis import given, settings
from hypothesis import strategies as st
from ratio_steps import logged, notices, random_step, surrogate, with_advantages

from grpozoo.testing import assemble, check_plugin, loss

C = "plugins.dual_clip.c=1.25"


@pytest.mark.parametrize("aggregation", ["seq_mean", "token_mean"])
def test_conformance(aggregation):
    check_plugin("dual_clip", "algo=dual_clip", f"plugins.grpo.aggregation={aggregation}")


def test_loss_and_gradient_of_the_worked_example():
    """F1, clip .2/.2, c = 1.25."""
    value, gradient = loss("algo=dual_clip", C)
    assert value == pytest.approx(0.008509, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(0.509201, abs=1e-6)
    assert gradient[0, :3].tolist() == pytest.approx([-0.037928, 0, -0.032645], abs=1e-6)
    assert gradient[1].tolist() == pytest.approx([0, 0.023924, 0, 0.020591, 0.026440], abs=1e-6)


@given(st.integers(0, 10_000), st.floats(1.21, 8), st.booleans())
@settings(max_examples=50, deadline=None)
def test_it_is_two_sided_with_delta_c(seed, c, by_token):
    step = random_step(seed)
    if by_token:
        step = with_advantages(step, torch.randn(6, 7, generator=torch.Generator().manual_seed(seed)).double())
    found = surrogate(DualClip(DualClip.Config(c=c)), step)
    expected = surrogate(TwoSided(TwoSided.Config(delta=c)), step)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-12, atol=1e-12)


def test_a_cap_inside_the_ratio_range_still_binds():
    """c = 1.1 < 1.2: at ratio 1.15 and A = -2 the loss is 1.1 * 2 and the gradient 0; at 1.05 both are 2.1 (one token)."""
    old = torch.full((1, 1), -1.0, dtype=torch.float64)
    tables = {"logprobs": old, "old_logprobs": old, "ref_logprobs": old, "entropy": -old}
    for ratio, value, slope in ((1.15, 2.2, 0.0), (1.05, 2.1, 2.1)):
        step = with_advantages(
            assemble([1], [0], [1.0], tables, old + torch.tensor(ratio).double().log()),
            torch.full((1, 1), -2.0, dtype=torch.float64),
        )
        losses, gradient = surrogate(DualClip(DualClip.Config(c=1.1)), step)
        assert losses.item() == pytest.approx(value, abs=1e-6) and gradient.item() == pytest.approx(slope, abs=1e-6)


def test_clipped_shares():
    """F1: clipped as by GRPO; .28 in row 1 and .35 in row 2 (A < 0) are above ln 1.25 = .223."""
    expected = {"ratio_clipped_low": 2 / 27, "ratio_clipped_high": 7 / 27, "ratio_capped": 2 / 27}
    assert logged("dual_clip", C) == pytest.approx(expected, abs=1e-7)


def test_one_update_per_batch_is_announced_as_without_effect():
    assert "plugins.dual_clip changes nothing with one update per batch" in notices("algo=dual_clip")[0]
    assert notices("algo=dual_clip", "update.epochs=2") == []


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clip": -0.1}, "clip is at least 0, got -0.1"),
        ({"clip_high": -0.1}, "clip_high is at least 0, got -0.1"),
        ({"c": 1.0}, "c is above 1, got 1.0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DualClip.Config(**options)
