"""The aggregation as a plugin: the numbers of GRPO's own option on fixture F1 (sheet 6.2), and who may own the hook."""

import pytest

from grpozoo import UserError
from grpozoo.testing import compose, loss


@pytest.mark.parametrize(
    "how, value, norm, row1",
    [
        ("seq_mean", 0.019241, 0.614639, [0, 0.023924, 0.028642, 0.020591, 0.026440]),
        ("token_mean", -0.166787, 0.558319, [0, 0.035442, 0.042432, 0.030505, 0.039170]),
        ("const_len", -0.112581, 0.376866, [0, 0.023924, 0.028642, 0.020591, 0.026440]),
        ("seq_sum", -0.562905, 1.884328, [0, 0.119618, 0.143208, 0.102956, 0.132198]),
    ],
)
def test_loss_and_gradient_of_the_worked_example(how, value, norm, row1):
    found, gradient = loss("algo=aggregation", f"plugins.aggregation.how={how}")
    assert found == pytest.approx(value, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(norm, abs=1e-6)
    assert gradient[1].tolist() == pytest.approx(row1, abs=1e-6)


def test_the_default_is_the_token_level_loss_and_the_sum_is_27_times_as_large():
    mean, sum_ = loss("algo=aggregation")[0], loss("algo=aggregation", "plugins.aggregation.how=token_sum")[0]
    assert mean == loss("plugins.grpo.aggregation=token_mean")[0]
    assert sum_ == pytest.approx(27 * mean, abs=1e-6)


def test_the_option_of_grpo_would_have_no_effect_and_off_is_grpo():
    with pytest.raises(UserError, match="plugins.grpo.aggregation=seq_sum has no effect: aggregation replaces"):
        compose("algo=aggregation", "plugins.grpo.aggregation=seq_sum")
    assert loss("algo=aggregation", "~plugins.aggregation")[0] == loss()[0]


def test_of_two_aggregations_one_must_go():
    with pytest.raises(UserError, match="aggregation and luffy both replace"):
        compose("algo=[aggregation,luffy]")


def test_an_unknown_name_is_refused():
    with pytest.raises(UserError, match="how"):
        compose("algo=aggregation", "plugins.aggregation.how=mean")
