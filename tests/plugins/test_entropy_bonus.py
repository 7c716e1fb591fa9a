"""algo=entropy_bonus: the worked batch, the gradient with respect to entropies and to logits, and its rivals."""

from dataclasses import replace

import pytest
import torch
from grpozoo_plugins.entropy_bonus import EntropyBonus
from two_groups import GRPO, TOKENS, two_groups

from grpozoo import Output, UserError
from grpozoo.testing import compose, fixture, loss
from grpozoo.testing.subject import Subject


def test_loss_of_the_worked_batch():
    """-0.046814 without, the mean entropy is 19 / 34 = 0.558824: -0.046814 - 0.01 * 0.558824 = -0.052402."""
    step = two_groups()
    plain, gradient = loss(*GRPO, step=step)
    found, with_bonus = loss("algo=entropy_bonus", "plugins.entropy_bonus.coef=0.01", *GRPO, step=step)
    assert plain == pytest.approx(-0.046814, abs=1e-6)
    assert found == pytest.approx(-0.052402, abs=1e-6)
    assert torch.equal(with_bonus, gradient)


@pytest.mark.parametrize("aggregation", ["seq_mean", "token_mean", "const_len", "seq_sum", "token_sum"])
def test_its_mean_is_over_tokens_under_every_aggregation(aggregation):
    how = f"plugins.grpo.aggregation={aggregation}"
    step = fixture()
    mean = step.out.entropy.detach()[step.batch.mask].mean().item()
    found, _ = loss("algo=entropy_bonus", "plugins.entropy_bonus.coef=0.5", how)
    assert found - loss(how)[0] == pytest.approx(-0.5 * mean, abs=1e-9)


def test_gradient_with_respect_to_entropies():
    """-beta / N at every token, rows of advantage 0 included; 0 beyond the completions."""
    live = Subject("entropy_bonus", ("algo=entropy_bonus", "plugins.entropy_bonus.coef=0.01")).fresh()
    step = two_groups()
    zero = replace(step.batch, advantages=step.batch.advantages * 0)
    _, (by_logprobs, by_entropy) = live.value_and_gradients(step._replace(batch=zero))
    assert not by_logprobs.any()
    torch.testing.assert_close(by_entropy, -0.01 / TOKENS * step.batch.mask.double(), rtol=0, atol=1e-15)


def test_gradient_with_respect_to_logits():
    """With A = 0: dL/dz_v = -beta / N pi_v (s_v - H), s the surprisal; entropies of a softmax over 7 tokens."""
    live = Subject("entropy_bonus", ("algo=entropy_bonus", "plugins.entropy_bonus.coef=0.01")).fresh()
    step = two_groups()
    mask = step.batch.mask
    z = torch.randn(*mask.shape, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    logits = z.log_softmax(-1)  # [R, T, V]
    H = -(logits.exp() * logits).sum(-1)
    batch = replace(step.batch, advantages=step.batch.advantages * 0, old_logprobs=logits[..., 0].detach())
    live.objective(step, batch, Output(logits[..., 0], H)).backward()
    by_hand = -0.01 / TOKENS * (logits.exp() * (-logits - H[..., None]) * mask[..., None]).detach()
    torch.testing.assert_close(z.grad, by_hand, rtol=0, atol=1e-15)


def test_the_logged_entropy_is_the_mean_over_tokens():
    live = Subject("entropy_bonus", ("algo=entropy_bonus",)).fresh()
    step = two_groups()
    live.objective(step)
    ((name, value, weight),) = live.plugin.logged
    assert (name, weight) == ("entropy_bonus/entropy", TOKENS)
    assert value == pytest.approx(19 / 34, abs=1e-12)


@pytest.mark.parametrize(
    "pair, reason",
    [
        ("entropy_bonus,adaptive_entropy", "adaptive_entropy and entropy_bonus both control the entropy: two controllers"),
        ("entropy_bonus,clip_cov", "clip_cov and entropy_bonus both control the entropy: two controllers"),
        ("steer,kl_cov", "kl_cov and steer both control the entropy: two controllers"),
        ("clip_cov,kl_cov", r"clip_cov and kl_cov both replace policy_loss\(\): keep one"),
    ],
)  # fmt: skip
def test_two_controllers_of_entropy_are_refused(pair, reason):
    with pytest.raises(UserError, match=reason):
        compose(f"algo=[{pair}]")


def test_a_negative_coefficient_is_refused():
    with pytest.raises(ValueError, match="coef is at least 0, got -0.1"):
        EntropyBonus.Config(coef=-0.1)
