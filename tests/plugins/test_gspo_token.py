"""GSPO-token: GSPO's numbers for one advantage per row, its own for advantages of tokens. Properties: test_gspo.py."""

import pytest
import torch
from grpozoo_plugins.gspo_token import GspoToken

from grpozoo.testing import advantages, compose, loss


@pytest.mark.parametrize(
    "overrides, value, norm",
    [
        (("clip=1", "clip_high=1e9"), 0.003037, 0.896847),
        (("clip=3e-4", "clip_high=4e-4"), 0.043796, 0.358357),
        ((), 0.019887, 0.504862),
    ],
)
def test_with_one_advantage_per_row_it_is_gspo(overrides, value, norm):
    found, gradient = loss("algo=gspo_token", *(f"plugins.gspo_token.{override}" for override in overrides))
    sequence, expected = loss(
        "algo=gspo", "plugins.gspo.form=sequence", *(f"plugins.gspo.{override}" for override in overrides)
    )
    assert found == pytest.approx(value, abs=1e-6) and found == pytest.approx(sequence, abs=1e-15)
    assert gradient.abs().sum().item() == pytest.approx(norm, abs=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-15)


def test_token_wise_advantages_of_the_worked_example():
    """A_it = A_i + 0.3 ((t mod 2) - 0.5), range .05: -s_i A_it / (8 L_i), row 0 is clipped in every token."""
    A = advantages()[:, None] + 0.3 * ((torch.arange(5) % 2) - 0.5)
    found, gradient = loss("algo=gspo_token", advantages=A)
    assert found == pytest.approx(0.060563, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(0.529100, abs=1e-6)
    assert gradient[0].tolist() == [0.0] * 5
    assert gradient[1].tolist() == pytest.approx([0.026592, 0.018739, 0.026592, 0.018739, 0.026592], abs=1e-6)
    assert gradient[3, :4].tolist() == pytest.approx([-0.023226, -0.032959, -0.023226, -0.032959], abs=1e-6)


def test_the_sign_of_a_tokens_advantage_decides_its_end_of_the_range():
    """Row 0, s = 1.068939 above 1.05: the token with A > 0 is clipped, the one with A < 0 has -s A / (8 * 3)."""
    A = torch.zeros(8, 5, dtype=torch.float64)
    A[0, :3] = torch.tensor([1.0, -1.0, 1.0])
    _, gradient = loss("algo=gspo_token", advantages=A)
    assert gradient[0, :3].tolist() == pytest.approx([0, 0.044539, 0], abs=1e-6)


def test_one_update_per_batch_is_noticed():
    for overrides, expected in (((), 1), (("update.mini_batches=4",), 0)):
        config, active = compose("algo=gspo_token", *overrides)
        notices = [notice for notice in active.hooks.validate(config=config, active=active) if notice]
        assert len(notices) == expected and all("every ratio is 1" in notice for notice in notices)


@pytest.mark.parametrize("options", [{"clip": -0.1}, {"clip_high": -1.0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        GspoToken.Config(**options)
