"""REINFORCE++ with and without the group's baseline: the sheet's numbers (grpo.md, 6.1), returns by hand, properties."""

import math
from functools import cache

import pytest
import torch
from grpozoo_plugins.reinforce_pp import ReinforcePp
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo.testing import advantages, assemble, check_plugin, fixture, loss
from grpozoo.testing.example import TOKEN_FIELDS, select, widen
from grpozoo.testing.golden import compose

TWINS = ["reinforce_pp", "reinforce_pp_baseline"]


@cache
def composed(name):
    """The plugins of `algo=NAME`, composed once for many examples."""
    return compose(f"algo={name}")[1]


def step_of(lengths, groups, rewards, ref=0.0):
    """A step with logp = old = -1 everywhere, and the reference `ref` nats below (a number or [R, T])."""
    old = torch.full((len(lengths), max(*lengths, 1)), -1.0, dtype=torch.float64)
    tables = {name: old for name in TOKEN_FIELDS} | {"ref_logprobs": old - ref}
    return assemble(lengths, groups, [math.nan if r is None else r for r in rewards], tables, old)


@pytest.mark.parametrize(
    "name, expected, norm, mean, variance",
    [
        ("reinforce_pp", [1.024666, -1.103486, -1.103486, 1.024666, -1.103486, -0.039410, 1.024666, -1.103486], [1, 0, 0, 1, 0, 0.5, 1, 0], 0.518519, 0.220798),
        ("reinforce_pp_baseline", [0.883585, -1.213715, -1.213715, 0.883585, -0.951553, 0.097097, 1.145747, -0.951553], [0.5, -0.5, -0.5, 0.5, -0.375, 0.125, 0.625, -0.375], 0.078704, 0.227342),
    ],
)  # fmt: skip
def test_advantages_of_the_worked_example(name, expected, norm, mean, variance):
    """27 tokens: rows of 3 5 2 4 1 4 5 3. reinforce_pp: sum L r = 3 + 4 + 2 + 5 = 14, mean 14/27 = .518519."""
    found, mask = advantages(f"algo={name}"), fixture().batch.mask
    for row, value in enumerate(expected):
        assert found[row][mask[row]].tolist() == pytest.approx([value] * int(mask[row].sum()), abs=1e-6)
        assert value == pytest.approx((norm[row] - mean) / variance**0.5, abs=3e-6)  # two rounded statistics
    assert not found[~mask].any()
    assert float(found[mask].mean()) == pytest.approx(0, abs=1e-12)
    assert float(found[mask].var()) == pytest.approx(1, abs=1e-6)  # 1e-8 stands below the root


@pytest.mark.parametrize("name", TWINS)
def test_loss_and_gradient_are_those_of_the_clipped_surrogate(name):
    """Token mean of -min(w A, clip(w, .8, 1.2) A), gradient -w A / 27 or 0 where the clip binds, from lp - lo by hand."""
    value, gradient = loss(f"algo={name}", "plugins.grpo.aggregation=token_mean")
    step, A = fixture(), advantages(f"algo={name}")
    w, mask = (step.out.logprobs - step.batch.old_logprobs).exp().detach(), step.batch.mask
    bound = ((A > 0) & (w > 1.2)) | ((A < 0) & (w < 0.8))
    assert value == pytest.approx(float(-(torch.where(bound, w.clamp(0.8, 1.2), w) * A)[mask].sum() / 27), abs=1e-9)
    torch.testing.assert_close(gradient, torch.where(bound | ~mask, 0.0, -w * A / 27), rtol=0, atol=1e-9)


def test_returns_of_token_rewards_and_discount_by_hand():
    """coef .5 and logp - ref = .2 .4 .6 give token rewards -.1 -.2 -.3; the row's verdict is 1, gamma .5:

    R_3 = -.3 + 1 = .7      R_2 = -.2 + .5 * .7 = .15      R_1 = -.1 + .5 * .15 = -.025
    the other row (one token, reward 0, logp - ref = -.2): R = .1
    mean (.7 + .15 - .025 + .1) / 4 = .23125
    var = (.46875^2 + .08125^2 + .25625^2 + .13125^2) / 3 = .1030729167 (squares .2197266 .0066016 .0656641 .0172266)
    """
    x = torch.tensor([[0.2, 0.4, 0.6], [-0.2, 9, 9]], dtype=torch.float64)
    command = ["algo=[reinforce_pp,kl]", "plugins.kl.form=reward", "plugins.kl.estimator=k1", "plugins.kl.coef=0.5"]
    found = advantages(*command, "plugins.reinforce_pp.gamma=0.5", step=step_of([3, 1], [0, 1], [1.0, 0.0], x))
    by_hand = [(R - 0.23125) / (0.1030729167 + 1e-8) ** 0.5 for R in (-0.025, 0.15, 0.7, 0.1)]
    assert [*found[0].tolist(), float(found[1, 0])] == pytest.approx(by_hand, abs=1e-8)
    assert found[1, 1:].tolist() == [0, 0]


def test_tokens_that_the_policy_did_not_sample_are_skipped():
    """mask 1 0 1 0, total 1, gamma .5: the last token is the third, the first is one sampled token away from it."""
    rewards = type("Rewards", (), {"total": torch.ones(1, dtype=torch.float64), "tokens": None})()
    plugin = ReinforcePp(ReinforcePp.Config(gamma=0.5))
    found = plugin.returns(rewards, torch.tensor([[True, False, True, False]]))
    assert found.tolist() == [[0.5, 0, 1, 0]]


def test_one_completion_per_prompt_is_enough_without_a_baseline():
    """Rewards 1 and 0, a token each: mean .5, var .5, A = +-.5 / sqrt(.5)."""
    step = step_of([1, 1], [0, 1], [1.0, 0.0])
    assert advantages("algo=reinforce_pp", step=step).flatten().tolist() == pytest.approx(
        [0.5**0.5, -(0.5**0.5)], abs=1e-7
    )
    assert advantages("algo=reinforce_pp_baseline", step=step).flatten().tolist() == [0, 0]


def test_an_equal_group_beside_another_stands_at_minus_the_token_mean():
    """Group 0: c = .5 (one token), -.5 (three); group 1: c = 0 (two tokens). Mean -1/6, var (4 * .25 - 6 / 36) / 5 = 1/6."""
    found = advantages("algo=reinforce_pp_baseline", step=step_of([1, 3, 1, 1], [0, 0, 1, 1], [1.0, 0.0, 0.1, 0.1]))
    shown = [float(found[0, 0]), *found[1].tolist(), float(found[2, 0]), float(found[3, 0])]
    by_hand = [(c + 1 / 6) / (1 / 6 + 1e-8) ** 0.5 for c in (0.5, -0.5, -0.5, -0.5, 0, 0)]
    assert shown == pytest.approx(by_hand, abs=1e-9)


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("value, rows", [(0.1, 7), (0.7, 13), (1e6 + 0.1, 5)])
def test_a_step_of_equal_rewards_has_advantage_exactly_zero(name, value, rows):
    step = step_of([1 + row % 3 for row in range(rows)], [0] * rows, [value] * rows)
    assert not advantages(f"algo={name}", step=step).any()


def test_equal_groups_of_different_rewards_have_advantage_exactly_zero_with_the_baseline():
    """The mean of seven times 1e9 + .1 is off by 1.2e-7: whitened, that would be an advantage of 1e-3."""
    step = step_of([2] * 9, [0] * 7 + [1] * 2, [1e9 + 0.1] * 7 + [0.0] * 2)
    assert not advantages("algo=reinforce_pp_baseline", step=step).any()


@pytest.mark.parametrize("name", TWINS)
def test_rows_without_a_reward_leave_the_statistics(name):
    step = step_of([3, 5, 2, 4, 0], [0, 0, 0, 1, 1], [1.0, 0.0, None, None, 0.5])
    alone = advantages(f"algo={name}", step=select(step, [0, 1, 4]))
    found = advantages(f"algo={name}", step=step)
    assert found[0].any()
    assert torch.equal(found[[0, 1, 4]], alone) and not found[2:4].any()
    assert not advantages(f"algo={name}", step=step_of([2, 2], [0, 0], [None, None])).any()


ROWS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.one_of(st.none(), st.floats(-3, 3))), min_size=2, max_size=10
)


@pytest.mark.parametrize("name", TWINS)
@given(rows=ROWS, random=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_rows_in_any_order_and_any_padding(name, rows, random):
    def advantage(step):
        return composed(name).hooks.advantage(rollouts=step.rollouts, rewards=step.rewards, run=None)

    step = step_of(*map(list, zip(*rows, strict=True)))
    found, mask = advantage(step), step.batch.mask
    live = mask & ~step.rewards.total.isnan()[:, None]
    assert abs(float(found[live].sum())) < 1e-6 and not found[~live].any()
    order = random.sample(range(len(rows)), len(rows))
    torch.testing.assert_close(advantage(select(step, order)), found[order], rtol=0, atol=1e-6)
    wide = advantage(widen(step, 2))
    torch.testing.assert_close(wide[:, : mask.shape[1]], found, rtol=0, atol=1e-6)


@pytest.mark.parametrize("gamma", [-0.1, 1.1, math.nan])
def test_the_discount_lies_between_0_and_1(gamma):
    with pytest.raises(ValueError, match=r"gamma lies in \[0, 1\]"):
        ReinforcePp.Config(gamma=gamma)


@pytest.mark.parametrize("name", TWINS)
def test_conformance(name):
    """No "singleton": the batch, not the group, is what a row is compared with."""
    assert {"missing rewards", "equal rewards"} <= set(check_plugin(name, f"algo={name}", skip={"singleton"}))
