"""LUSPO: GSPO's row losses times their lengths."""

import pytest
import torch
from grpozoo_plugins.luspo import Luspo

from grpozoo.testing import advantages, compose, fixture, loss
from grpozoo.types import Output

LENGTHS = torch.tensor([3, 5, 2, 4, 1, 4, 5, 3])


def test_loss_and_gradient_of_the_worked_example():
    """Range .05; unclipped rows: -s_i A_i / 8, the same for every length."""
    found, gradient = loss("algo=luspo")
    assert found == pytest.approx(-0.553907, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(1.536671, abs=1e-6)
    rows = [0, 0.113330, 0.138976, -0.112370, 0.106052, -0.034135, 0, 0]
    assert gradient[:, 0].tolist() == pytest.approx(rows, abs=1e-6)
    torch.testing.assert_close(gradient, gradient[:, :1] * fixture().batch.mask, rtol=0, atol=1e-15)


def test_its_gradient_is_gspos_times_the_length():
    options = [f"plugins.{name}.clip={low}" for name, low in (("gspo", 0.002), ("luspo", 0.002))]
    _, gspo = loss("algo=gspo", options[0], "plugins.gspo.clip_high=0.0025")
    _, luspo = loss("algo=luspo", options[1], "plugins.luspo.clip_high=0.0025")
    assert luspo.any()
    torch.testing.assert_close(luspo, gspo * LENGTHS[:, None], rtol=0, atol=1e-15)


def test_at_the_first_update_it_is_grpo_with_seq_sum():
    step = fixture()
    step = step._replace(out=Output(step.rollouts.old_logprobs.clone().requires_grad_()))
    value, gradient = loss("algo=luspo", step=step)
    expected, expected_gradient = loss("algo=grpo", "plugins.grpo.aggregation=seq_sum", step=step)
    assert value == pytest.approx(expected, abs=1e-14)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-15)


def test_advantages_of_tokens_act_on_their_tokens():
    """Row 1, s = 1.047074: -s A_it / 8 with A_it = -1, -2, ..."""
    A = -torch.ones(8, 5, dtype=torch.float64).cumsum(1)
    _, gradient = loss("algo=luspo", advantages=A)
    assert gradient[1].tolist() == pytest.approx([0.130884 * t for t in (1, 2, 3, 4, 5)], abs=3e-6)


def test_one_update_per_batch_is_noticed():
    for overrides, expected in (((), 1), (("update.mini_batches=4",), 0)):
        config, active = compose("algo=luspo", *overrides)
        notices = [notice for notice in active.hooks.validate(config=config, active=active) if notice]
        assert len(notices) == expected and all("seq_sum" in notice for notice in notices)


def test_advantage_zero_has_no_loss():
    value, gradient = loss("algo=luspo", advantages=0 * advantages())
    assert value == 0 and not gradient.any()


@pytest.mark.parametrize("options", [{"clip": -0.1}, {"clip_high": -1.0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Luspo.Config(**options)
