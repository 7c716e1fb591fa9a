"""GSPO's numbers (fixture F1) and what makes it GSPO: one ratio per completion, of a spread that shrinks with length."""

from functools import cache

import pytest
import torch
from grpozoo_plugins.gspo import Gspo
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo import Plugin, UserError, hookimpl
from grpozoo.compose.plugins import register
from grpozoo.ops import denominators
from grpozoo.testing import Context, advantages, assemble, check_plugin, compose, fixture, loss
from grpozoo.testing.example import whole_batch
from grpozoo.types import Output
from grpozoo.update import objective

ROWS = st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=6), min_size=1, max_size=5)  # log ratios of completions
OPEN = ("plugins.gspo.clip=1", "plugins.gspo.clip_high=1e9")  # a range that never binds
UNTIED = 0.3 * ((torch.arange(5) % 2) - 0.5)  # [T], makes advantages vary over tokens


def step_of(changes):
    """Completions of the given log ratios lp - lo, old log-probabilities -1."""
    lengths = [len(row) for row in changes]
    change = torch.zeros(len(changes), max(lengths), dtype=torch.float64)
    for row, values in enumerate(changes):
        change[row, : len(values)] = torch.as_tensor(values, dtype=torch.float64)
    old = torch.full_like(change, -1.0)
    tables = {name: old for name in ("logprobs", "old_logprobs", "ref_logprobs", "entropy")}
    return assemble(lengths, [0] * len(lengths), [0.0] * len(lengths), tables, old + change)


def signs(rows):
    """Advantages [rows] of both signs."""
    return [1.0 if row % 2 else -0.7 for row in range(rows)]


@cache
def live(*overrides):
    """The plugins of a command line, ready; composed once, for tests with many examples."""
    config, active = compose(*overrides)
    active.hooks.setup(run=Context(config, active))
    return active


def evaluate(active, step, A):
    """Loss and gradient [R, T], as `loss` computes them."""
    batch = whole_batch(step.rollouts, step.rewards, torch.as_tensor(A, dtype=torch.float64))
    how, denominator = active.hooks.aggregation(), denominators(batch.mask, 5)
    value = objective(active.hooks, batch, step.out, how, denominator, "all_rows" in active.needs)
    return float(value.detach()), torch.autograd.grad(value, step.out.logprobs)[0]


def by_row(gradient, mask):
    """[R]: the gradient that all tokens of a row share."""
    for row, live in zip(gradient, mask, strict=True):
        assert float(row[live].max() - row[live].min()) < 1e-12
        assert not row[~live].any()
    return gradient[:, 0].tolist()


def test_conformance():
    check_plugin("gspo", "algo=gspo", "plugins.gspo.form=token")


@pytest.mark.parametrize("form", ["auto", "sequence", "token"])
@pytest.mark.parametrize(
    "overrides, value, norm, rows",
    [
        (OPEN, 0.003037, 0.896847, [-0.038565, 0.022666, 0.069488, -0.028093, 0.106052, -0.008534, -0.036941, 0.030528]),
        (("algo=gspo_paper",), 0.043796, 0.358357, [0, 0.022666, 0.069488, 0, 0.106052, 0, 0, 0]),
        ((), 0.019887, 0.504862, [0, 0.022666, 0.069488, -0.028093, 0.106052, -0.008534, 0, 0]),
    ],
)  # fmt: skip
def test_loss_and_gradient_of_the_worked_example(form, overrides, value, norm, rows):
    """s = 1.068939 1.047074 1.284025 1.038212 1.083287 1.046028 1.132016 .935507; unclipped: -s_i A_i / (8 L_i)."""
    algo = overrides if overrides and overrides[0].startswith("algo") else ("algo=gspo", *overrides)
    found, gradient = loss(*algo, f"plugins.gspo.form={form}")
    assert found == pytest.approx(value, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(norm, abs=1e-6)
    assert by_row(gradient, fixture().batch.mask) == pytest.approx(rows, abs=1e-6)


@pytest.mark.parametrize("form", ["auto", "token"])
def test_token_wise_advantages_of_the_worked_example(form):
    """A_it = A_i + 0.3 ((t mod 2) - 0.5), range .05."""
    found, gradient = loss("algo=gspo", f"plugins.gspo.form={form}", advantages=advantages()[:, None] + UNTIED)
    assert found == pytest.approx(0.060563, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(0.529100, abs=1e-6)
    assert gradient[0].tolist() == [0.0] * 5
    assert gradient[1].tolist() == pytest.approx([0.026592, 0.018739, 0.026592, 0.018739, 0.026592], abs=1e-6)
    assert gradient[3, :4].tolist() == pytest.approx([-0.023226, -0.032959, -0.023226, -0.032959], abs=1e-6)


def test_the_sequence_form_refuses_token_wise_advantages():
    with pytest.raises(UserError, match="form=sequence.*vary over its tokens\n.*gspo_token"):
        loss("algo=gspo", "plugins.gspo.form=sequence", advantages=advantages()[:, None] + UNTIED)


def test_at_the_first_update_it_is_grpo():
    """s = 1: value -mean A, gradient -A_i / (B L_i)."""
    step = fixture()
    step = step._replace(out=Output(step.rollouts.old_logprobs.clone().requires_grad_()))
    value, gradient = loss("algo=gspo", step=step)
    plain, expected = loss("algo=grpo", step=step)
    assert value == pytest.approx(-advantages().mean().item(), abs=1e-15)
    assert value == pytest.approx(plain, abs=1e-15)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-15)


@given(ROWS, st.randoms())
@settings(max_examples=40, deadline=None)
def test_only_the_sum_of_a_rows_log_ratios_matters(rows, random):
    """Token ratios may be permuted, or the whole spread evenly; a row is clipped entirely or not at all."""
    shuffled = [random.sample(row, len(row)) for row in rows]
    even = [[sum(row) / len(row)] * len(row) for row in rows]
    value, gradient = evaluate(live("algo=gspo"), step_of(rows), signs(len(rows)))
    by_row(gradient, step_of(rows).batch.mask)
    for other in (shuffled, even):
        if any(abs(abs(sum(row) / len(row)) - edge) < 1e-9 for row in rows for edge in (0.0487902, 0.0512933)):
            continue  # on the edge of the range rounding decides
        found, other_gradient = evaluate(live("algo=gspo"), step_of(other), signs(len(rows)))
        assert found == pytest.approx(value, abs=1e-12)
        torch.testing.assert_close(other_gradient, gradient, rtol=0, atol=1e-12)


def test_grpos_loss_does_depend_on_the_order_of_token_ratios():
    """The property above is one of GSPO, not of the fixture: [.5, -.5, 0] and [0, 0, 0] have one s."""
    gspo, grpo = ([loss(algo, step=step_of([row]), advantages=[1.0])[0] for row in ([0.5, -0.5, 0], [0, 0, 0])]
                  for algo in ("algo=gspo", "algo=grpo"))  # fmt: skip
    assert gspo[0] == pytest.approx(gspo[1], abs=1e-12)
    assert abs(grpo[0] - grpo[1]) > 0.05  # mean of min(w, 1.2) = (1.2 + e^-.5 + 1) / 3 = .935510


@given(st.lists(st.tuples(st.floats(-0.5, 0.5), st.integers(1, 6)), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_a_constant_log_ratio_gives_grpo_with_the_same_range(rows):
    step, A = step_of([[c] * length for c, length in rows]), signs(len(rows))
    wide = ("plugins.grpo.clip=1", "plugins.grpo.clip_high=1e9")
    value, gradient = evaluate(live("algo=gspo", *OPEN), step, A)
    expected, expected_gradient = evaluate(live("algo=grpo", *wide), step, A)
    assert value == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)


@given(ROWS)
@settings(max_examples=30, deadline=None)
def test_a_completion_of_twice_the_length_has_the_same_loss(rows):
    A = signs(len(rows))
    once, gradient = evaluate(live("algo=gspo", *OPEN), step_of(rows), A)
    twice, longer = evaluate(live("algo=gspo", *OPEN), step_of([row + row for row in rows]), A)
    assert twice == pytest.approx(once, abs=1e-12)
    torch.testing.assert_close(longer[:, 0], gradient[:, 0] / 2, rtol=0, atol=1e-12)


@given(ROWS, st.lists(st.lists(st.floats(-2, 2), min_size=6, max_size=6), min_size=5, max_size=5))
@settings(max_examples=30, deadline=None)
def test_auto_is_gspo_token_for_any_advantages(rows, A):
    step = step_of(rows)
    A = torch.tensor(A, dtype=torch.float64)[: len(rows), : step.batch.mask.shape[1]]
    for given_advantages in (A, A[:, 0]):
        value, gradient = evaluate(live("algo=gspo"), step, given_advantages)
        expected, expected_gradient = evaluate(live("algo=gspo_token"), step, given_advantages)
        assert value == pytest.approx(expected, abs=1e-14)
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-14)


def test_noise_of_the_old_log_probabilities_averages_out_over_the_completion():
    """Noise N(0, sigma) per token: std of a row's weight s is sigma / sqrt(L), that of GRPO's token weights is sigma.

    512 rows estimate a std to 1 / sqrt(1024) = 3 %; 12 % are four of those.
    """
    sigma, rows = 0.05, 512
    generator = torch.Generator().manual_seed(8)
    wide = ("plugins.grpo.clip=1", "plugins.grpo.clip_high=1e9")
    for length in (64, 256):
        noise = sigma * torch.randn(rows, length, generator=generator, dtype=torch.float64)
        step = step_of(noise)
        relative = {}
        for algo, overrides in (("gspo", OPEN), ("grpo", wide)):
            gradient = loss(f"algo={algo}", *overrides, step=step, advantages=[1.0] * rows)[1]
            relative[algo] = (gradient * -rows * length).std().item()  # the noise-free gradient is -1 / (B L)
        assert relative["gspo"] == pytest.approx(sigma / length**0.5, rel=0.12)
        assert relative["grpo"] == pytest.approx(sigma, rel=0.12)


class Ramp(Plugin):
    """A plugin that weighs tokens: 1, 2, 3 ... over a completion."""

    @hookimpl
    def token_weights(self, batch):
        return torch.ones_like(batch.advantages).cumsum(1)


class Wrap(Plugin):
    """The same weights as a change of the loss."""

    @hookimpl(wrapper=True)
    def policy_loss(self, batch):
        losses = yield
        return losses * torch.ones_like(batch.advantages).cumsum(1)


def loss_under(other, *overrides):
    """Gradient on F1 with one more plugin, and the notices."""
    config, active = compose(*overrides)
    active = register(active.plugins | {"other": other})
    active.hooks.setup(run=Context(config, active))
    gradient = evaluate(active, fixture(), advantages())[1]
    return gradient, active.hooks.validate(config=config, active=active)


@pytest.mark.parametrize("other", [Ramp, Wrap])
def test_token_weights_act_on_their_tokens_and_the_notice_says_so(other):
    """Row 1 with s = 1.047074: -w_t s A / (8 * 5), w = 1..5. The sequence form sees their mean, 3."""
    unit = 0.022666
    gradient, notices = loss_under(other(None), "algo=gspo", "update.mini_batches=4")
    assert gradient[1].tolist() == pytest.approx([unit * w for w in (1, 2, 3, 4, 5)], abs=5e-6)
    assert [notice for notice in notices if notice] == ["gspo: token form (eq. 14), because of other"]
    gradient, notices = loss_under(other(None), "algo=gspo", "plugins.gspo.form=sequence", "update.mini_batches=4")
    assert gradient[1].tolist() == pytest.approx([3 * unit] * 5, abs=5e-6)
    assert not any(notices)


def test_one_update_per_batch_is_noticed():
    for overrides, expected in (((), 1), (("update.mini_batches=4",), 0), (("update.epochs=2",), 0)):
        config, active = compose("algo=gspo", *overrides)
        notices = [notice for notice in active.hooks.validate(config=config, active=active) if notice]
        assert len(notices) == expected and all("every ratio is 1" in notice for notice in notices)


def test_clipped_rows_and_tokens_are_logged():
    """Range .05: rows 0, 6, 7 of 8 with 3 + 5 + 3 of 27 tokens."""
    config, active = compose("algo=gspo")
    step = fixture()
    active.hooks.policy_loss(batch=step.batch, out=step.out)
    logged = {name: (value, weight) for name, value, weight in active.plugins["gspo"].logged}
    assert logged["gspo/clipped_rows"] == (pytest.approx(3 / 8), 8)
    assert logged["gspo/clipped_tokens"] == (pytest.approx(11 / 27), 27)
    assert logged["gspo/token_form"] == (0, 8)


def test_an_enormous_ratio_stays_finite():
    """log s is clamped at 10, where the gradient ends."""
    value, gradient = loss("algo=gspo", *OPEN, step=step_of([[500.0, 500.0]]), advantages=[-1.0])
    assert value == pytest.approx(22026.465795, abs=1e-6)  # e^10
    assert not gradient.any()


def test_a_second_surrogate_is_refused():
    with pytest.raises(UserError, match="gspo and gspo_token both replace policy_loss"):
        compose("algo=[gspo,gspo_token]")


@pytest.mark.parametrize("options", [{"clip": -0.1}, {"clip_high": -1.0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Gspo.Config(**options)
