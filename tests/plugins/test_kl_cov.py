"""algo=kl_cov: the worked batch, the choice of tokens and its invariances, the notice with one update per batch."""

from dataclasses import replace

import pytest
import torch
from grpozoo_plugins.kl_cov import KlCov
from hypothesis import given, settings
from hypothesis import strategies as st
from two_groups import ADVANTAGES, GRPO, LOG_RATIOS, TOKENS, places, two_groups

from grpozoo.testing import check_plugin, compose, loss
from grpozoo.testing.example import select, whole_batch

THREE = {(7, 2), (1, 3), (0, 1)}  # covariances 1.931426, 1.506084, 0.435447


def chosen(share, step=None, shift=0.0, lift=0.0):
    """K of a step, after `shift` is added to all advantages and `lift` to all log-probabilities."""
    plugin = KlCov(KlCov.Config(share=share))
    plugin.name = "kl_cov"
    step = step or two_groups()
    batch = replace(step.batch, advantages=step.batch.advantages + shift)
    out = replace(step.out, logprobs=step.out.logprobs.detach() + lift)
    return plugin.minibatch(batch=batch, out=out)["kl_cov/K"], plugin


@pytest.mark.parametrize("share", [0.002, 0.3])
def test_conformance(share):
    check_plugin("kl_cov", "algo=kl_cov", f"plugins.kl_cov.share={share}")


@pytest.mark.parametrize(
    "options, expected",
    [
        (["share=0.1"], -0.036999),  # floor(3.4) = 3
        (["share=2e-4"], -0.048764),  # one token at least
        (["share=0.1", "coef=0"], -0.059058),
    ],
)
def test_loss_of_the_worked_batch(options, expected):
    found, _ = loss("algo=kl_cov", *(f"plugins.kl_cov.{option}" for option in options), *GRPO, step=two_groups())
    assert found == pytest.approx(expected, abs=1e-6)


def test_gradient_of_the_worked_batch():
    """(-A w + beta sign(log w)) / N on K, where w is not 1, and -A w / N elsewhere, also beyond any clip."""
    step, beta = two_groups(), 0.5
    _, gradient = loss("algo=kl_cov", "plugins.kl_cov.share=0.1", f"plugins.kl_cov.coef={beta}", *GRPO, step=step)
    for row, token in places(step.batch.mask):
        x = torch.tensor(LOG_RATIOS.get((row, token), 0.0))
        by_hand = (-ADVANTAGES[row] * x.exp() + (beta * x.sign() if (row, token) in THREE else 0.0)) / TOKENS
        assert gradient[row, token].item() == pytest.approx(by_hand.item(), abs=1e-6)


def test_chosen_tokens_of_the_worked_batch():
    K, plugin = chosen(0.1)
    assert places(K) == THREE
    assert plugin.logged == [("kl_cov/threshold", pytest.approx(0.435447, abs=1e-6), 1.0)]
    assert places(chosen(2e-4)[0]) == {(7, 2)}
    assert places(chosen(0.15)[0]) == THREE | {(0, 4), (3, 2)}


@given(st.floats(-3, 3), st.floats(-3, 3))
@settings(max_examples=50, deadline=None)
def test_constants_added_to_advantages_or_logprobs_change_no_choice(shift, lift):
    assert places(chosen(0.1, shift=shift, lift=lift)[0]) == THREE


@given(st.permutations(range(8)))
@settings(max_examples=50, deadline=None)
def test_row_order_changes_no_choice(order):
    K, _ = chosen(0.1, select(two_groups(), order))
    assert {(order[row], token) for row, token in places(K)} == THREE


@given(st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_the_number_of_tokens_is_exact(share):
    assert int(chosen(share)[0].sum()) == max(1, int(share * TOKENS))


def test_tokens_without_advantage_may_be_chosen():
    """The first group has equal rewards: A = 0 there, but not once it is centred (the mean over tokens is not 0)."""
    step = two_groups()
    A = torch.tensor([0.0] * 4 + [1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    K, _ = chosen(0.1, step._replace(batch=whole_batch(step.rollouts, step.rewards, A)))
    assert (3, 0) in places(K)  # mean A 11/34, mean logp -0.552353: (0 - 0.323529) (-2.5 + 0.552353) = 0.630121
    gradient = loss("algo=kl_cov", "plugins.kl_cov.share=0.1", *GRPO, step=step, advantages=A)[1]
    assert gradient[3, 0].item() == pytest.approx(1 / TOKENS, abs=1e-9)


def test_on_policy_it_is_the_plain_ratio():
    step = two_groups()
    step = step._replace(out=replace(step.out, logprobs=step.rollouts.old_logprobs))
    with_penalty = loss("algo=kl_cov", "plugins.kl_cov.share=0.5", *GRPO, step=step)
    without = loss("algo=kl_cov", "plugins.kl_cov.coef=0", *GRPO, step=step)
    assert with_penalty[0] == without[0]
    assert torch.equal(with_penalty[1], without[1])


@pytest.mark.parametrize("updates, notices", [(("mini_batches=1", "epochs=1"), 1), (("mini_batches=2",), 0), (("epochs=2",), 0)])  # fmt: skip
def test_notice_with_one_update_per_batch(updates, notices):
    config, active = compose("algo=kl_cov", *(f"update.{update}" for update in updates))
    found = [notice for notice in active.hooks.validate(config=config, active=active) if notice]
    assert len(found) == notices
    assert all("kl_cov is inert with one update per batch" in notice for notice in found)


@pytest.mark.parametrize("options", [{"share": -0.1}, {"share": 1.1}, {"coef": -1.0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        KlCov.Config(**options)
