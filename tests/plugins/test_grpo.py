"""GRPO's numbers: fixture F1 of the method sheet (section 6), and the edge cases of groups (section 3.13)."""

import pytest
import torch
from grpozoo_plugins.grpo import Grpo, Std
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo.testing import advantages, fixture, loss


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ([], [0.865875, -0.865875, -0.865875, 0.865875, -0.783186, 0.261062, 1.305310, -0.783186]),
        (["plugins.grpo.eps=1e-6"], [0.866024, -0.866024, -0.866024, 0.866024, -0.783348, 0.261116, 1.305580, -0.783348]),
        (["plugins.grpo.eps=0", "plugins.grpo.ddof=0"], [1, -1, -1, 1, -0.904534, 0.301511, 1.507557, -0.904534]),
        (["plugins.grpo.std=none"], [0.5, -0.5, -0.5, 0.5, -0.375, 0.125, 0.625, -0.375]),
        (["plugins.grpo.std=batch"], [1.008846, -1.008846, -1.008846, 1.008846, -0.756635, 0.252212, 1.261058, -0.756635]),
    ],
)  # fmt: skip
def test_advantages_of_the_worked_example(overrides, expected):
    assert advantages(*overrides).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "overrides, value, norm, row0, row1",
    [
        ([], 0.019241, 0.614639, [-0.037928, 0, -0.032645], [0, 0.023924, 0.028642, 0.020591, 0.026440]),
        (["aggregation=token_mean"], -0.166787, 0.558319, [-0.033714, 0, -0.029018], [0, 0.035442, 0.042432, 0.030505, 0.039170]),
        (["aggregation=const_len"], -0.112581, 0.376866, [-0.022757, 0, -0.019587], [0, 0.023924, 0.028642, 0.020591, 0.026440]),
        (["aggregation=seq_sum"], -0.562905, 1.884328, [-0.113784, 0, -0.097935], [0, 0.119618, 0.143208, 0.102956, 0.132198]),
        (["aggregation=token_mean", "clip_high=0.28"], -0.182516, 0.718787, [-0.033714, 0, -0.029018], [0, 0.035442, 0.042432, 0.030505, 0.039170]),
        (["kl_coef=0.04"], 0.020016, 0.620372, [-0.037928, 0.000369, -0.032730], [-0.000350, 0.024063, 0.028847, 0.020540, 0.026661]),
    ],
)  # fmt: skip
def test_loss_and_gradient_of_the_worked_example(overrides, value, norm, row0, row1):
    """27 tokens; the sums of |gradient| and two of its rows, by hand from lp, lo, lr and the advantages of eps 1e-4."""
    found, gradient = loss(*(f"plugins.grpo.{override}" for override in overrides))
    assert found == pytest.approx(value, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(norm, abs=1e-6)
    assert gradient[0, :3].tolist() == pytest.approx(row0, abs=1e-6)
    assert gradient[1].tolist() == pytest.approx(row1, abs=1e-6)


def test_token_sum_is_token_mean_times_the_tokens():
    total, _ = loss("plugins.grpo.aggregation=token_sum")
    mean, _ = loss("plugins.grpo.aggregation=token_mean")
    assert total == pytest.approx(27 * mean, abs=1e-9)


def test_a_range_that_never_binds_is_the_unclipped_ratio():
    wide, _ = loss("plugins.grpo.clip=1", "plugins.grpo.clip_high=1e9")
    step, A = fixture(), advantages()
    ratio = (step.out.logprobs - step.batch.old_logprobs).exp()
    mask = step.batch.mask
    by_hand = (-(ratio * A[:, None]) * mask).sum(1) / mask.sum(1)
    assert wide == pytest.approx(by_hand.mean().item(), abs=1e-7)  # advantages travel in float32


def advantage_of(rewards, groups=None, **options):
    """The plugin's advantage on rewards [R] and group ids."""
    total = torch.tensor([float("nan") if r is None else r for r in rewards], dtype=torch.float64)
    group_id = torch.tensor(groups or [0] * len(rewards))
    rollouts = type("Rollouts", (), {"group_id": group_id})()
    plugin = Grpo(Grpo.Config(**options))
    return plugin.advantage(rollouts=rollouts, rewards=type("Rewards", (), {"total": total})())


@pytest.mark.parametrize("value, size", [(0.1, 7), (0.7, 13), (0.95, 8), (1e6 + 0.1, 5)])
@pytest.mark.parametrize("std", list(Std))
def test_equal_rewards_give_exactly_zero(value, size, std):
    """Sheet 3.13: in float32 seven rewards of 0.1 would give 0.41 at eps 1e-8."""
    assert advantage_of([value] * size, std=std, eps=0.0).tolist() == [0.0] * size
    assert advantage_of([0.1 + 0.2, 0.3, 0.3], std=std, eps=0.0).tolist() == [0.0] * 3


def test_a_row_without_a_reward_leaves_its_group():
    """Peers B1: [1, 0, None, None] centred is [.5, -.5], not [.75, -.25]."""
    assert advantage_of([1.0, 0.0, None, None], std=Std.none).tolist() == [0.5, -0.5, 0.0, 0.0]
    assert advantage_of([1.0] + [None] * 7).tolist() == [0.0] * 8  # peers B3: the std of one is no number
    assert advantage_of([None, None]).tolist() == [0.0, 0.0]


def test_one_outlier_does_not_explode():
    """Peers B6: leave-one-out in float32 gave thousands; here |A| stays below sqrt(G)."""
    assert advantage_of([0.0] + [0.95] * 7).abs().max() < 8**0.5


@given(
    st.lists(st.tuples(st.integers(0, 4), st.one_of(st.none(), st.floats(-5, 5))), min_size=1, max_size=24),
    st.randoms(),
)
@settings(max_examples=80, deadline=None)
def test_groups_of_any_size_in_any_order(rows, random):
    groups, rewards = [group for group, _ in rows], [reward for _, reward in rows]
    found = advantage_of(rewards, groups)
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        alone = advantage_of([rewards[i] for i in members])
        torch.testing.assert_close(found[members], alone, rtol=0, atol=1e-9)
        assert abs(float(alone.sum())) < 1e-6
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = advantage_of([rewards[i] for i in order], [groups[i] for i in order])
    torch.testing.assert_close(shuffled, found[order], rtol=0, atol=1e-9)


@given(st.floats(0.1, 10), st.floats(-3, 3))
@settings(max_examples=30, deadline=None)
def test_advantages_do_not_change_under_a_positive_affine_map_of_rewards(scale, shift):
    rewards = [1.0, 0.0, 0.25, 1.0]
    plain = advantage_of(rewards, eps=0.0)
    torch.testing.assert_close(advantage_of([scale * r + shift for r in rewards], eps=0.0), plain, rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", [{"ddof": 2}, {"clip": -0.1}, {"kl_coef": -1.0}, {"eps": -1e-3}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Grpo.Config(**options)
