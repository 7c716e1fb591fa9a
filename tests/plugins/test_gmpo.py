"""algo=gmpo: F1 of the method sheet (6.2), the geometric mean, and advantages that it refuses."""

import pytest
import torch
from grpozoo_plugins.gmpo import Gmpo
from hypothesis import given, settings
from hypothesis import strategies as st
from ratio_steps import logged, notices, random_step, surrogate

from grpozoo import UserError
from grpozoo.testing import compose, example, fixture, loss


@pytest.mark.parametrize(
    "clip, value, norm, row0, row1",
    [
        (0.2, 0.018018, 0.663175, [-0.037928, 0, -0.037928], [0, 0.023124, 0.023124, 0.023124, 0.023124]),
        (0.4, 0.003037, 0.896847, [-0.038565] * 3, [0.022666] * 5),
    ],
)
def test_loss_and_gradient_of_the_worked_example(clip, value, norm, row0, row1):
    """F1; at .2 row 0 loses its token of .25 and row 1 that of -.30."""
    found, gradient = loss("algo=gmpo", f"plugins.gmpo.clip={clip}")
    assert found == pytest.approx(value, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(norm, abs=1e-6)
    assert gradient[0, :3].tolist() == pytest.approx(row0, abs=1e-6)
    assert gradient[1].tolist() == pytest.approx(row1, abs=1e-6)


@given(st.integers(0, 10_000), st.floats(0.01, 2))
@settings(max_examples=40, deadline=None)
def test_tokens_within_the_range_share_the_gradient_and_the_others_have_none(seed, clip):
    step = random_step(seed)
    losses, gradient = surrogate(Gmpo(Gmpo.Config(clip=clip)), step)
    x = step.out.logprobs.detach() - step.batch.old_logprobs
    for row, length in enumerate(step.batch.lengths.tolist()):
        A, ratios = step.batch.advantages[row, 0].item(), x[row, :length].tolist()
        y = [min(x, clip) if A > 0 else max(x, -clip) for x in ratios]
        value = -A * torch.tensor(y, dtype=torch.float64).exp().prod().item() ** (1 / length)
        assert losses[row, :length].tolist() == pytest.approx([value] * length, rel=1e-9)
        share = [value / length / 6 if kept == x else 0 for kept, x in zip(y, ratios, strict=True)]
        assert gradient[row, :length].tolist() == pytest.approx(share, rel=1e-9)


def test_the_aggregation_is_its_own():
    with pytest.raises(UserError, match="plugins.grpo.aggregation=token_mean has no effect: gmpo replaces"):
        loss("algo=gmpo", "plugins.grpo.aggregation=token_mean")


def test_advantages_that_differ_within_a_completion_are_refused():
    """One token of row 1 is enough; what stands beyond the mask does not count."""
    A = fixture().batch.advantages.clone()
    A[0, 3:] = 7.0  # row 0 has three tokens
    assert loss("algo=gmpo", advantages=A)[0] == pytest.approx(0.003037, abs=1e-6)
    A[1, 4] *= 1.5
    with pytest.raises(UserError, match="weighs a whole completion by one advantage.*\n.*algo=gspo_token"):
        loss("algo=gmpo", advantages=A)


def test_an_empty_completion_has_loss_zero():
    step = example()  # row 3 has no token
    losses = Gmpo(Gmpo.Config()).policy_loss(batch=step.batch, out=step.out)
    assert losses.shape == (11, 1) and losses[3].item() == 0


def test_clipped_share():
    """F1 at .21: .25 | .22 .30 | .26 | .24 .30 above with A > 0, -.30 and -.26 below with A < 0."""
    assert logged("gmpo", "plugins.gmpo.clip=0.21") == pytest.approx({"clipped": 8 / 27}, abs=1e-7)


def test_one_update_per_batch_is_announced_as_grpo():
    assert "plugins.gmpo is GRPO with aggregation seq_mean" in notices("algo=gmpo")[0]
    assert notices("algo=gmpo", "update.mini_batches=2") == []


def test_a_second_surrogate_is_refused():
    with pytest.raises(UserError, match=r"gmpo and sapo both replace policy_loss\(\)"):
        compose("algo=[gmpo,sapo]")


def test_a_negative_clip_is_refused():
    with pytest.raises(ValueError, match="clip is at least 0 nats, got -0.1"):
        Gmpo.Config(clip=-0.1)
