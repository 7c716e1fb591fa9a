"""algo=cispo: F1 of the method sheet (6.2), and which tokens have a gradient."""

import pytest
import torch
from grpozoo_plugins.cispo import Cispo
from grpozoo_plugins.clip_higher import ClipHigher
from hypothesis import given, settings
from hypothesis import strategies as st
from ratio_steps import logged, notices, random_step, surrogate

from grpozoo.testing import check_plugin, loss

CAP = "plugins.cispo.clip_high=0.2"  # the weight is at most 1.2


@pytest.mark.parametrize("options", [["plugins.grpo.aggregation=token_mean"], ["plugins.cispo.token_mask=true"]])
def test_conformance(options):
    check_plugin("cispo", "algo=cispo", *options)


def test_loss_and_gradient_of_the_worked_example():
    """F1, cap 1.2, no lower end, token_mean."""
    value, gradient = loss("algo=cispo", CAP, "plugins.grpo.aggregation=token_mean")
    assert value == pytest.approx(0.198687, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(0.893877, abs=1e-6)
    assert gradient[0, :3].tolist() == pytest.approx([-0.033714, -0.038483, -0.029018], abs=1e-6)
    assert gradient[1].tolist() == pytest.approx([0.023758, 0.035442, 0.038483, 0.030505, 0.038483], abs=1e-6)


@given(st.integers(0, 10_000), st.sampled_from([None, 0.2, 0.9]))
@settings(max_examples=30, deadline=None)
def test_every_token_keeps_a_bounded_gradient(seed, low):
    """-v A of its row's share, v in [1 - clip_low, 1 + clip_high] and above 0."""
    step = random_step(seed)
    _, gradient = surrogate(Cispo(Cispo.Config(clip_low=low, clip_high=0.5)), step)
    batch, w = step.batch, (step.out.logprobs.detach() - step.batch.old_logprobs).exp()
    v = w.clamp(0 if low is None else 1 - low, 1.5)
    torch.testing.assert_close(gradient, -v * batch.advantages / batch.lengths[:, None] / 6, rtol=1e-12, atol=1e-15)
    assert bool((gradient != 0)[batch.mask].all())


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_with_the_token_mask_and_a_cap_out_of_reach_it_has_the_gradient_of_clip(seed):
    """Eq. 7 drops exactly the tokens that PPO's clip silences."""
    step = random_step(seed)
    _, found = surrogate(Cispo(Cispo.Config(clip_high=1e12, token_mask=True, mask_low=0.3, mask_high=0.4)), step)
    _, expected = surrogate(ClipHigher(ClipHigher.Config(clip=0.3, clip_high=0.4)), step)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_shares():
    """F1: ten ratios above 1.2 (.25 | .28 .20 | .35 | .22 .30 | .26 | .20 .24 .30); the mask drops what GRPO clips, 2 + 7.

    Below .8 are -.30, -.25, -.24 and -.26; they count with clip_low = .2 only.
    """
    assert logged("cispo", CAP) == pytest.approx({"weight_clipped": 10 / 27, "dropped": 0}, abs=1e-7)
    shares = logged("cispo", CAP, "plugins.cispo.clip_low=0.2", "plugins.cispo.token_mask=true")
    assert shares == pytest.approx({"weight_clipped": 14 / 27, "dropped": 9 / 27}, abs=1e-7)


def test_one_update_per_batch_is_announced_as_without_effect():
    assert "plugins.cispo changes nothing with one update per batch" in notices("algo=cispo")[0]
    assert notices("algo=cispo", "update.mini_batches=2") == []


def test_the_default_cap_is_five():
    assert torch.equal(
        loss("algo=cispo")[1], loss("algo=cispo", "plugins.cispo.clip_high=4", "plugins.cispo.clip_low=1")[1]
    )


@pytest.mark.parametrize("name", ["clip_low", "clip_high", "mask_low", "mask_high"])
def test_options_out_of_range_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is at least 0, got -0.1"):
        Cispo.Config(**{name: -0.1})
