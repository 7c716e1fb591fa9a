"""algo=token_class: the class has its own mean in the loss, whatever it is and wherever it stands."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from grpozoo_plugins.token_class import TokenClass
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo import UserError
from grpozoo.testing import check_plugin, compose, fixture, loss

TEXT = {2: "a", 3: " =", 4: "12", 5: "+", 6: "b\n", 7: "(-x", 8: " ", 9: "*", 10: "/"}
TOKEN_MEAN = "plugins.grpo.aggregation=token_mean"
FEW = "plugins.token_class.pattern='^(3|9)$'"  # the kit's tokenizer writes ids in decimal: tokens 3 and 9


class Decoder:
    """A policy that only decodes, and remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def decode(self, ids):
        self.asked.append(ids)
        return TEXT[ids[0]]


def weights(**options):
    """The table of F1 and its class."""
    plugin = TokenClass(TokenClass.Config(**options))
    plugin.name = "token_class"
    step = fixture()
    run = SimpleNamespace(policy=Decoder())
    table = plugin.minibatch(batch=step.batch, out=step.out, run=run)["token_class/weights"].detach()
    return table, plugin, step


@pytest.mark.parametrize("options", [(), (FEW,)])
def test_conformance(options):
    check_plugin("token_class", "algo=token_class", *options)


def in_class(step, ids):
    """[R, T] bool: M by hand."""
    M = torch.zeros_like(step.batch.mask)
    for row, length in enumerate(step.batch.lengths.tolist()):
        for token in range(length):
            M[row, token] = 2 + (row + 2 * token) % 9 in ids  # the token ids of the fixture
    return M


@pytest.mark.parametrize("alpha", [0.1, 0.5, 2.0])
def test_loss_is_the_mean_plus_alpha_times_the_mean_over_the_class(alpha):
    """Value and gradient of L + alpha / |M| sum_M l on F1, in which 6 of 27 tokens are 3 or 9."""
    step = fixture()
    M, mask = in_class(step, (3, 9)), step.batch.mask
    assert int(M.sum()) == 6
    logp = step.out.logprobs.detach().clone().requires_grad_()
    ratio, A = (logp - step.batch.old_logprobs).exp(), step.batch.advantages
    losses = torch.maximum(-ratio * A, -ratio.clamp(0.8, 1.2) * A)
    by_hand = losses[mask].sum() / 27 + alpha / 6 * losses[M].sum()
    by_hand.backward()
    found, gradient = loss("algo=token_class", FEW, f"plugins.token_class.alpha={alpha}")
    assert found == pytest.approx(by_hand.item(), abs=1e-6)
    torch.testing.assert_close(gradient, logp.grad, rtol=0, atol=1e-6)


def test_default_pattern_marks_operators_and_equals_signs():
    """Tokens 3, 5, 7, 9 and 10 contain one of + - * / =; N / |M| per alpha on them."""
    table, plugin, step = weights(alpha=0.5)
    M = in_class(step, (3, 5, 7, 9, 10))
    size = int(M.sum())
    torch.testing.assert_close(table, 1 + 0.5 * 27 / size * M.double(), rtol=0, atol=1e-12)
    assert plugin.logged == [("token_class/marked", size / 27, 27.0)]


@given(st.sampled_from(["[ab]", r"^\d+$", r"\s", r"\+", r"^-", r"^\(-x$"]), st.floats(0, 3))
@settings(max_examples=30, deadline=None)
def test_the_class_adds_alpha_times_all_tokens(pattern, alpha):
    """sum over tokens of w - 1 is alpha N if there is a class, else 0."""
    table, plugin, step = weights(pattern=pattern, alpha=alpha)
    some = plugin.logged[0][1] > 0
    assert some == (pattern != "^-")
    assert (table - 1)[step.batch.mask].sum().item() == pytest.approx(27 * alpha if some else 0, abs=1e-9)
    assert (table[~step.batch.mask] == 1).all()


@pytest.mark.parametrize("off", ["plugins.token_class.alpha=0", "plugins.token_class.pattern=nothing"])
def test_off_is_grpo_under_token_mean(off):
    """No weight, or no token in the class."""
    found, plain = loss("algo=token_class", FEW, off), loss(TOKEN_MEAN)
    assert found[0] == plain[0]
    assert torch.equal(found[1], plain[1])


def test_padding_that_spells_a_member_is_no_member():
    """Ids beyond the mask may be anything, here "=" as in a vocabulary that has it at the padding's id."""
    expected, plugin, step = weights()
    ids = step.rollouts.completion_ids.masked_fill(~step.batch.mask, 3)
    batch = replace(step.batch, rollouts=replace(step.rollouts, completion_ids=ids))
    run = SimpleNamespace(policy=Decoder())
    assert torch.equal(plugin.minibatch(batch=batch, out=step.out, run=run)["token_class/weights"], expected)


def test_a_token_is_decoded_once():
    plugin = TokenClass(TokenClass.Config())
    plugin.name, step, run = "token_class", fixture(), SimpleNamespace(policy=Decoder())
    for _ in range(3):
        plugin.minibatch(batch=step.batch, out=step.out, run=run)
    assert sorted(run.policy.asked) == [[i] for i in range(2, 11)]  # padding has id 0 and is not asked for


def test_another_aggregation_is_refused():
    with pytest.raises(UserError, match=r"dr_grpo and token_class both replace aggregation\(\)"):
        compose("algo=[token_class,dr_grpo]")
    with pytest.raises(UserError, match="plugins.grpo.aggregation=seq_sum has no effect: token_class replaces"):
        compose("algo=token_class", "plugins.grpo.aggregation=seq_sum")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pattern": "["}, "is no regular expression"),
        ({"pattern": "=*"}, "pattern matches the empty text"),
        ({"pattern": ""}, "pattern matches the empty text"),
        ({"alpha": -0.1}, "alpha is at least 0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TokenClass.Config(**options)
