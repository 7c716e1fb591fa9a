"""algo=clip_higher: F1 of the method sheet (6.2), the worked batch of the entropy baselines (section 1), the dead zone."""

import math

import pytest
import torch
from grpozoo_plugins.clip_higher import ClipHigher
from hypothesis import given, settings
from hypothesis import strategies as st
from ratio_steps import logged, notices, random_step, surrogate

from grpozoo.testing import assemble, check_plugin, loss

SYMMETRIC = "plugins.clip_higher.clip_high=0.2"
TOKEN_MEAN = "plugins.grpo.aggregation=token_mean"


@pytest.mark.parametrize("aggregation", ["seq_mean", "token_mean"])
def test_conformance(aggregation):
    check_plugin("clip_higher", "algo=clip_higher", f"plugins.grpo.aggregation={aggregation}")


def test_loss_and_gradient_of_the_worked_example():
    """F1, clip .2/.28, token_mean: DAPO's pair."""
    value, gradient = loss("algo=clip_higher", TOKEN_MEAN)
    assert value == pytest.approx(-0.182516, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(0.718787, abs=1e-6)
    assert gradient[0, :3].tolist() == pytest.approx([-0.033714, 0, -0.029018], abs=1e-6)
    assert gradient[1].tolist() == pytest.approx([0, 0.035442, 0.042432, 0.030505, 0.039170], abs=1e-6)


@pytest.mark.parametrize("aggregation", ["seq_mean", "token_mean", "const_len", "seq_sum"])
def test_a_symmetric_range_is_grpo(aggregation):
    value, gradient = loss("algo=clip_higher", SYMMETRIC, f"plugins.grpo.aggregation={aggregation}")
    expected, grpo = loss("algo=grpo", f"plugins.grpo.aggregation={aggregation}")
    assert value == expected and torch.equal(gradient, grpo)


def worked_batch():
    """Two groups of four, 34 tokens, rewards 1 0 0 1 | 1 1 1 0; six tokens have moved."""
    lengths = [5, 4, 5, 3, 5, 4, 5, 3]
    current = -torch.tensor([
        [0.10, 0.02, 1.50, 0.30, 0.05], [0.70, 0.01, 0.20, 2.20, 0], [0.05, 0.90, 0.03, 0.40, 0.60], [2.50, 0.15, 0.08, 0, 0],
        [0.20, 0.35, 0.04, 0.01, 0.12], [0.60, 3.00, 0.25, 0.02, 0], [0.03, 0.07, 0.45, 1.10, 0.09], [0.80, 0.06, 1.80, 0, 0],
    ], dtype=torch.float64)  # fmt: skip
    moved = torch.zeros_like(current)
    for row, token, by in ((0, 2, 0.4), (1, 3, -0.4), (3, 0, 0.1), (5, 1, -0.05), (7, 2, 0.35), (2, 1, -0.3)):
        moved[row, token] = by
    old = current - moved
    tables = {"logprobs": old, "old_logprobs": old, "ref_logprobs": old, "entropy": -current}
    return assemble(lengths, [0] * 4 + [1] * 4, [1, 0, 0, 1, 1, 1, 1, 0], tables, current)


@pytest.mark.parametrize("options, expected", [([SYMMETRIC], -0.046814), ([], -0.048852)])
def test_loss_of_the_batch_of_the_entropy_baselines(options, expected):
    """(0,2), (1,3) and (2,1) are clipped in both; (3,0) has A = .866024, ratio 1.105171: -.957105 / 34 = -.028150."""
    value, gradient = loss("algo=clip_higher", TOKEN_MEAN, "plugins.grpo.eps=1e-6", *options, step=worked_batch())
    assert value == pytest.approx(expected, abs=1e-6)
    assert gradient[3, 0].item() == pytest.approx(-0.028150, abs=1e-6)
    assert [gradient[i, t].item() for i, t in ((0, 2), (1, 3), (2, 1))] == [0, 0, 0]
    assert gradient[7, 2].item() > 0.01  # ratio 1.42 with A < 0: not clipped


@given(st.floats(1.2001, 1.2799), st.floats(0.01, 5))
@settings(max_examples=20, deadline=None)
def test_a_good_token_between_the_two_ends_still_learns(ratio, advantage):
    """Ratio in (1.2, 1.28), A > 0: gradient -w A with the wide end and 0 with the narrow one."""
    old = torch.full((1, 1), -2.0, dtype=torch.float64)
    tables = {"logprobs": old, "old_logprobs": old, "ref_logprobs": old, "entropy": -old}
    step = assemble([1], [0], [1.0], tables, old + math.log(ratio))
    step.batch.advantages.fill_(advantage)
    assert surrogate(ClipHigher(ClipHigher.Config()), step)[1].item() == pytest.approx(-ratio * advantage, rel=1e-12)
    assert surrogate(ClipHigher(ClipHigher.Config(clip_high=0.2)), step)[1].item() == 0


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_a_range_that_never_binds_is_the_unclipped_ratio(seed):
    """clip 1, clip_high huge: -w A, which is also its gradient."""
    step = random_step(seed)
    losses, gradient = surrogate(ClipHigher(ClipHigher.Config(clip=1.0, clip_high=1e12)), step)
    batch = step.batch
    by_hand = -(step.out.logprobs.detach() - batch.old_logprobs).exp() * batch.advantages
    torch.testing.assert_close(losses, by_hand, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, by_hand / batch.lengths[:, None] / 6, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options, high", [([SYMMETRIC], 7), ([], 4)])
def test_clipped_shares(options, high):
    """F1: -.30 and -.26 below ln .8 with A < 0; .25 .22 .30 .26 .20 .24 .30 above ln 1.2 = .182, four above ln 1.28 = .247."""
    expected = {"ratio_clipped_low": 2 / 27, "ratio_clipped_high": high / 27}
    assert logged("clip_higher", *options) == pytest.approx(expected, abs=1e-7)


def test_one_update_per_batch_is_announced_as_without_effect():
    assert "plugins.clip_higher changes nothing with one update per batch" in notices("algo=clip_higher")[0]
    assert notices("algo=clip_higher", "update.epochs=2") == notices("algo=clip_higher", "update.mini_batches=2") == []


@pytest.mark.parametrize("name", ["clip", "clip_high"])
def test_options_out_of_range_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is at least 0, got -0.1"):
        ClipHigher.Config(**{name: -0.1})
