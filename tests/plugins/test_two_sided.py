"""algo=two_sided: F1 of the method sheet (6.2), and the limits of the cap (section 7, item 4)."""

import pytest
import torch
from grpozoo_plugins.clip_higher import ClipHigher
from grpozoo_plugins.two_sided import TwoSided
from hypothesis import given, settings
from hypothesis import strategies as st
from ratio_steps import logged, notices, random_step, surrogate

from grpozoo.testing import check_plugin, loss

DELTA = "plugins.two_sided.delta=1.25"


@pytest.mark.parametrize("aggregation", ["seq_mean", "token_mean"])
def test_conformance(aggregation):
    check_plugin("two_sided", "algo=two_sided", f"plugins.grpo.aggregation={aggregation}")


def test_loss_and_gradient_of_the_worked_example():
    """F1, clip .2/.2, delta 1.25: of row 1 (A < 0) the third token, ratio e^.28 = 1.32, loses its gradient."""
    value, gradient = loss("algo=two_sided", DELTA)
    assert value == pytest.approx(0.008509, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(0.509201, abs=1e-6)
    assert gradient[0, :3].tolist() == pytest.approx([-0.037928, 0, -0.032645], abs=1e-6)
    assert gradient[1].tolist() == pytest.approx([0, 0.023924, 0, 0.020591, 0.026440], abs=1e-6)


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_an_infinite_cap_is_clip(seed):
    step = random_step(seed)
    found = surrogate(TwoSided(TwoSided.Config(delta=float("inf"), clip=0.3, clip_high=0.4)), step)
    expected = surrogate(ClipHigher(ClipHigher.Config(clip=0.3, clip_high=0.4)), step)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@given(st.integers(0, 10_000), st.floats(1.3, 6))
@settings(max_examples=30, deadline=None)
def test_the_cap_bounds_bad_tokens_and_leaves_good_ones_alone(seed, delta):
    """A < 0: loss at most -delta A, gradient 0 beyond; A > 0: the loss of clip."""
    step = random_step(seed)
    losses, gradient = surrogate(TwoSided(TwoSided.Config(delta=delta)), step)
    clip, _ = surrogate(ClipHigher(ClipHigher.Config(clip_high=0.2)), step)
    A, w = step.batch.advantages, (step.out.logprobs.detach() - step.batch.old_logprobs).exp()
    assert torch.equal(losses[A > 0], clip[A > 0])
    assert bool((losses <= -delta * A + 1e-12)[A < 0].all())
    assert not gradient[(A < 0) & (w > delta)].any()


def test_clipped_shares():
    """F1: clipped as by GRPO; .28 in row 1 and .35 in row 2 (A < 0) are above ln 1.25 = .223."""
    expected = {"ratio_clipped_low": 2 / 27, "ratio_clipped_high": 7 / 27, "ratio_capped": 2 / 27}
    assert logged("two_sided", DELTA) == pytest.approx(expected, abs=1e-7)


def test_one_update_per_batch_is_announced_as_without_effect():
    assert "plugins.two_sided changes nothing with one update per batch" in notices("algo=two_sided")[0]
    assert notices("algo=two_sided", "update.epochs=2") == []


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clip": -0.1}, "clip is at least 0, got -0.1"),
        ({"clip_high": -0.1}, "clip_high is at least 0, got -0.1"),
        ({"delta": 1.2}, r"delta is above 1 \+ clip_high = 1.2, got 1.2"),
        ({"delta": 4.0, "clip_high": 3.0}, r"delta is above 1 \+ clip_high = 4, got 4"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TwoSided.Config(**options)
