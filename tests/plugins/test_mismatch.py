"""Weights of the sampler / trainer mismatch: the sheet's numbers, bounds, normalisation, refusals."""

from dataclasses import replace

import pytest
import torch
from grpozoo_plugins.mismatch import Level, Mismatch, Mode

from grpozoo import UserError
from grpozoo.testing import Context, check_plugin, compose, fixture, loss
from grpozoo.testing.example import with_tables

PRODUCTS = [1.947734, 0.670320, 1.305605, 0.586646, 1.491825, 0.586646, 1.491825, 0.513417]
LENGTHS = [3, 5, 2, 4, 1, 4, 5, 3]


def options(**values):
    return [f"plugins.mismatch.{name}={'null' if value is None else value}" for name, value in values.items()]


def weights(*overrides, step=None):
    """The factor that the plugin answers [R, T], all rows one optimizer step; 0 where masked."""
    config, active = compose("algo=mismatch", *overrides)
    run, step = Context(config, active), step or fixture()
    batch = with_tables(active.hooks, step.batch, step.out, run)
    (answer,) = active.hooks.token_weights(batch=batch, out=step.out)
    return answer.masked_fill(~batch.mask, 0)


@pytest.mark.parametrize(
    "overrides",
    [
        ("algo=mismatch",),
        ("algo=mismatch", *options(normalize=True)),
        ("algo=mismatch", *options(level="token", mode="truncate", normalize=True)),
        ("algo=mismatch", *options(level="geometric", c_min=0.9, c_max=1.1)),
        ("algo=tis",),
        ("algo=icepop",),
    ],
)
def test_conformance(overrides):
    check_plugin("mismatch", *overrides)


def test_ratios_of_tokens_and_of_completions():
    """rho = exp(-0.4 (((i + 2t) mod 4) - 1.5) / 1.5); row 0: e^.4, e^-.1333, e^.4."""
    token = weights(*options(level="token", c_max=None))
    assert token[0, :3].tolist() == pytest.approx([1.491825, 0.875173, 1.491825], abs=1e-6)
    sequence = weights(*options(c_max=None))
    assert sequence[:, 0].tolist() == pytest.approx(PRODUCTS, abs=1e-6)
    torch.testing.assert_close(sequence, sequence[:, :1] * fixture().batch.mask, rtol=0, atol=0)


def test_truncate_and_mask_at_the_upper_end():
    """C_max = 1.4 is passed by rows 0, 4 and 6."""
    over = {0, 4, 6}
    masked = weights(*options(c_max=1.4))[:, 0].tolist()
    assert masked == pytest.approx([0 if i in over else rho for i, rho in enumerate(PRODUCTS)], abs=1e-6)
    truncated = weights(*options(c_max=1.4, mode="truncate"))[:, 0].tolist()
    assert truncated == pytest.approx([1.4 if i in over else rho for i, rho in enumerate(PRODUCTS)], abs=1e-6)


def test_both_ends_for_tokens():
    both = {"level": "token", "c_min": 0.7, "c_max": 1.3}
    assert weights(*options(**both))[0, :3].tolist() == pytest.approx([0, 0.875173, 0], abs=1e-6)
    assert weights(*options(**both, mode="truncate"))[0, :3].tolist() == pytest.approx([1.3, 0.875173, 1.3], abs=1e-6)
    low = weights(*options(level="token", c_min=0.9, c_max=None, mode="truncate"))
    assert low[0, :3].tolist() == pytest.approx([1.491825, 0.9, 1.491825], abs=1e-6)


def test_geometric_keeps_or_drops():
    """exp(mean): 1.948^(1/3) = 1.248859, .670^(1/5) = .923116, 1.142630, .875173, 1.491825, .875173, 1.083287, .800737."""
    kept = weights(*options(level="geometric", c_min=0.85, c_max=1.2))[:, 0]
    assert kept.tolist() == [0, 1, 1, 1, 0, 1, 1, 0]


def test_loss_of_the_worked_example_with_token_tis():
    """C = 1.3, GRPO's clip with seq_mean: row 0 of plain GRPO, -.037928 and -.032645, times 1.3."""
    value, gradient = loss("algo=tis", *options(c_max=1.3))
    assert value == pytest.approx(0.032286, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(0.667784, abs=1e-6)
    assert gradient[0, :3].tolist() == pytest.approx([-0.049306, 0, -0.042438], abs=1e-6)
    assert gradient[1].tolist() == pytest.approx([0, 0.016036, 0.032727, 0.013803, 0.030211], abs=1e-6)


def test_presets_are_the_published_ones():
    for name, expected in (
        ("tis", (Level.token, Mode.truncate, None, 2.0)),
        ("icepop", (Level.token, Mode.mask, 0.5, 5.0)),
    ):
        found = compose(f"algo={name}")[1].plugins["mismatch"].config
        assert (found.level, found.mode, found.c_min, found.c_max, found.normalize) == (*expected, False)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_normalised_weights_have_mean_one(mode):
    """Over tokens for level=token; over completions, long or short, for the others. Dropped ones count."""
    token = weights(*options(level="token", mode=mode, c_max=1.3, normalize=True))
    assert token.sum().item() == pytest.approx(27, abs=1e-9)
    sequence = weights(*options(mode=mode, c_max=1.4, normalize=True))[:, 0]
    assert sequence.mean().item() == pytest.approx(1, abs=1e-9)
    plain = weights(*options(mode=mode, c_max=1.4))[:, 0]
    torch.testing.assert_close(sequence, plain / plain.mean(), rtol=0, atol=1e-9)


def test_normalisation_of_nothing_is_nothing():
    assert not weights(*options(c_max=0.1, normalize=True)).any()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_completion_that_nobody_sampled_has_weight_one_and_no_part_in_the_mean(level, normalize):
    step = fixture()
    rollouts = replace(step.rollouts, policy=("teacher", *step.rollouts.policy[1:]))
    given = step._replace(rollouts=rollouts, batch=replace(step.batch, rollouts=rollouts))
    chosen = options(level=level, c_min=0.6, c_max=1.4, normalize=normalize)
    found = weights(*chosen, step=given)
    assert found[0, :3].tolist() == [1, 1, 1]
    others = found[1:]
    if normalize and level == "token":
        assert others.sum().item() == pytest.approx(24, abs=1e-9)
    elif normalize:
        assert others[:, 0].mean().item() == pytest.approx(1, abs=1e-9)
    else:
        torch.testing.assert_close(others, weights(*chosen)[1:], rtol=0, atol=0)


@pytest.mark.parametrize("overrides", [(), ("algo=tis",), ("algo=icepop",), tuple(options(normalize=True))])
def test_without_a_mismatch_it_is_grpo(overrides):
    """One engine: rho = 1, and loss and gradient are those of GRPO bit for bit."""
    step = fixture()
    rollouts = replace(step.rollouts, logprobs=step.rollouts.old_logprobs)
    step = step._replace(
        rollouts=rollouts, batch=replace(step.batch, sampler_logprobs=rollouts.logprobs, rollouts=rollouts)
    )
    algo = () if any(o.startswith("algo") for o in overrides) else ("algo=mismatch",)
    value, gradient = loss(*algo, *overrides, step=step)
    expected, expected_gradient = loss("algo=grpo", step=step)
    assert value == expected and torch.equal(gradient, expected_gradient)


def test_the_weight_does_not_touch_the_regulariser():
    """All completions dropped: what is left is the KL term alone."""
    dropped, _ = loss("algo=mismatch", *options(c_max=0.1), "plugins.grpo.kl_coef=0.04")
    with_kl, without = loss("plugins.grpo.kl_coef=0.04")[0], loss()[0]
    assert dropped == pytest.approx(with_kl - without, abs=1e-12)


def test_old_log_probabilities_are_measured_only_to_normalise():
    for normalize in (False, True):
        active = compose("algo=mismatch", *options(normalize=normalize))[1]
        assert bool(active.hooks.minibatch.get_hookimpls()) is normalize


@pytest.mark.parametrize("source, outside", [("policy", 9 / 27), ("teacher", 6 / 27)])
def test_what_is_outside_is_logged(source, outside):
    """C_max = 1.4: rows 0, 4 and 6 with 3 + 1 + 5 of 27 tokens; row 0 is not, if nobody sampled it."""
    active = compose("algo=mismatch", *options(c_max=1.4))[1]
    step = fixture()
    rollouts = replace(step.rollouts, policy=(source, *step.rollouts.policy[1:]))
    active.hooks.token_weights(batch=replace(step.batch, rollouts=rollouts), out=step.out)
    logged = {name: (float(value), weight) for name, value, weight in active.plugins["mismatch"].logged}
    kept = [0 if rho > 1.4 else rho for rho in PRODUCTS]
    kept[0] = 1 if source == "teacher" else kept[0]
    mean = sum(n * weight for n, weight in zip(LENGTHS, kept, strict=True)) / 27
    assert logged["mismatch/outside"] == (pytest.approx(outside), 27)
    assert logged["mismatch/weight"] == (pytest.approx(mean, abs=1e-6), 27)


@pytest.mark.parametrize("algo", ["gspo", "gspo_token", "luspo"])
def test_token_weights_do_not_stack_with_a_ratio_of_completions(algo):
    for preset in ("tis", "icepop"):
        config, active = compose(f"algo=[{algo},{preset}]")
        with pytest.raises(UserError, match=rf"level=token does not stack with {algo}"):
            active.hooks.validate(config=config, active=active)
    config, active = compose(f"algo=[{algo},mismatch]")
    active.hooks.validate(config=config, active=active)


def test_a_weight_of_completions_scales_gspos_rows():
    plain = loss("algo=gspo")[1]
    weighted = loss("algo=[gspo,mismatch]", *options(c_max=None))[1]
    torch.testing.assert_close(weighted, plain * torch.tensor(PRODUCTS)[:, None], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "values",
    [
        {"c_min": -0.1},
        {"c_min": 4.0},
        {"c_max": -1.0},
        {"c_min": 1.2, "c_max": 1.1},
        {"level": Level.geometric, "mode": Mode.truncate},
    ],
)
def test_options_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match="c_min <= c_max" if "level" not in values else "keeps or drops"):
        Mismatch.Config(**values)
