"""Entropy advantage: the numbers of the sheet (entropy_baselines.md, 5, on the batch of stare.md, 6.3) and properties."""

import math
from functools import cache

import pytest
import torch
from grpozoo_plugins.entropy_advantage import EntropyAdvantage
from hypothesis import given, settings
from hypothesis import strategies as st
from two_groups import GRPO, two_groups

from grpozoo import UserError
from grpozoo.compose.plugins import register
from grpozoo.testing import advantages, assemble, fixture, loss
from grpozoo.testing.example import garble
from grpozoo.testing.golden import compose


@cache
def composed(*overrides):
    """The plugins of a command line, composed once for many examples."""
    return compose(*overrides, *GRPO)[1]


def batch(rewards=(1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0), entropy=None):
    """The worked batch of two groups of four and 34 tokens, on-policy; rewards [8], entropy [8] of all tokens of a row."""
    step = two_groups()
    current = step.out.logprobs.detach()
    tables = dict.fromkeys(("logprobs", "old_logprobs", "ref_logprobs"), current)
    H = step.rollouts.entropy if entropy is None else torch.tensor(entropy)[:, None].expand(current.shape)
    return assemble(step.rollouts.lengths.tolist(), [0] * 4 + [1] * 4, list(rewards), tables | {"entropy": H}, current)


def test_advantages_of_the_worked_example():
    """Row 0, A = .866024: .4 H = .16 .04 .48 .24 .08, at most .433012."""
    found = advantages("algo=entropy_advantage", *GRPO, step=batch())
    assert found[0].tolist() == pytest.approx([1.026024, 0.906024, 1.299036, 1.106024, 0.946024], abs=1e-6)
    assert found[1, :4].tolist() == pytest.approx([-0.506024, -0.846024, -0.666024, -0.433012], abs=1e-6)


def test_loss_and_gradient_of_the_worked_example():
    """On-policy the loss is minus the mean of A' over the 34 tokens, and its gradient -A' / 34."""
    value, gradient = loss("algo=entropy_advantage", *GRPO, step=batch())
    assert value == pytest.approx(-0.245088, abs=1e-6)
    by_hand = torch.tensor([-1.026024, -0.906024, -1.299036, -1.106024, -0.946024], dtype=torch.float64) / 34
    torch.testing.assert_close(gradient[0], by_hand, rtol=0, atol=1e-6)


def test_alpha_zero_is_the_base_exactly():
    base = advantages(*GRPO, step=batch())
    found = advantages("algo=entropy_advantage", "plugins.entropy_advantage.alpha=0", *GRPO, step=batch())
    assert torch.equal(found, base[:, None].expand(found.shape))


def test_it_wraps_an_advantage_of_tokens_too():
    step = fixture()
    base = advantages("algo=reinforce_pp", step=step)  # [R, T]
    found = advantages("algo=[reinforce_pp,entropy_advantage]", step=step)
    added = (0.4 * step.rollouts.entropy).minimum(base.abs() / 2)
    torch.testing.assert_close(found, base + added, rtol=0, atol=1e-12)
    assert not torch.equal(found, base)


@given(
    st.lists(st.sampled_from([0.0, 0.25, 1.0, None]), min_size=8, max_size=8),
    st.lists(st.floats(0, 8), min_size=8, max_size=8),
    st.sampled_from([1.01, 2.0, 5.0]),
)
@settings(max_examples=60, deadline=None)
def test_the_sign_stays_and_the_term_is_bounded(rewards, entropies, kappa):
    """Sheet: kappa above 1 never flips a sign; nothing is added where A = 0."""
    rewards = [math.nan if reward is None else reward for reward in rewards]
    step = batch(rewards, entropies)
    given = {"rollouts": step.rollouts, "rewards": step.rewards, "run": None}
    base = composed().hooks.advantage(**given)[:, None]
    found = composed("algo=entropy_advantage", f"plugins.entropy_advantage.kappa={kappa}").hooks.advantage(**given)
    assert torch.equal(found.sign(), base.sign().expand(found.shape))
    added = found - base
    assert bool((added >= 0).all()) and bool((added <= base.abs() / kappa + 1e-12).all())
    assert not added[~step.batch.mask].any()


def test_entropies_of_masked_tokens_add_nothing():
    step = batch()
    found = advantages("algo=entropy_advantage", *GRPO, step=step)
    assert torch.equal(advantages("algo=entropy_advantage", *GRPO, step=garble(step, math.inf)), found)


def test_it_logs_the_mean_term():
    """A' - A over the 34 tokens: .245088 - .048058 (the sheet's on-policy losses of both)."""
    config, active = compose("algo=entropy_advantage", *GRPO)
    step = batch()
    active.hooks.advantage(rollouts=step.rollouts, rewards=step.rewards, run=None)
    ((name, value, weight),) = active.plugins["entropy_advantage"].logged
    assert (name, weight) == ("entropy_advantage/bonus", 34.0)
    assert value == pytest.approx(0.245088 - 0.048058, abs=2e-6)


def test_two_controllers_of_the_entropy_are_refused():
    one, two = EntropyAdvantage(EntropyAdvantage.Config()), EntropyAdvantage(EntropyAdvantage.Config())
    with pytest.raises(UserError, match="one and two both control the entropy"):
        register({**compose()[1].plugins, "one": one, "two": two})


@pytest.mark.parametrize("options", [{"kappa": 1.0}, {"alpha": -0.1}, {"kappa": math.nan}, {"alpha": math.nan}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        EntropyAdvantage.Config(**options)
