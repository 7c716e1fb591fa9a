"""Dr. GRPO's numbers on the worked example, and what centring alone promises."""

import inspect

import pytest
import torch
from group_steps import F1, advantage_of
from grpozoo_plugins import dr_grpo
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo.errors import UserError
from grpozoo.testing import advantages, assemble, compose, fixture, loss

GRPO = [0.865875, -0.865875, -0.865875, 0.865875, -0.783186, 0.261062, 1.305310, -0.783186]  # advantages of F1


def test_advantages_of_the_worked_example():
    """Rewards 1 0 0 1 | 0 .5 1 0, means .5 and .375."""
    assert advantages("algo=dr_grpo").tolist() == [0.5, -0.5, -0.5, 0.5, -0.375, 0.125, 0.625, -0.375]


def test_loss_and_gradient_are_divided_by_rows_and_the_constant_length():
    """GRPO's advantages, so that the aggregation alone differs: const_len with C = 5."""
    value, gradient = loss("algo=dr_grpo", advantages=GRPO)
    assert value == pytest.approx(-0.112581, abs=1e-6)
    assert gradient.abs().sum().item() == pytest.approx(0.376866, abs=1e-6)
    assert gradient[0, :3].tolist() == pytest.approx([-0.022757, 0, -0.019587], abs=1e-6)
    assert gradient[1].tolist() == pytest.approx([0, 0.023924, 0.028642, 0.020591, 0.026440], abs=1e-6)


def test_its_own_loss_on_the_worked_example_is_the_sum_written_out():
    step, A = fixture(), [0.5, -0.5, -0.5, 0.5, -0.375, 0.125, 0.625, -0.375]
    total = 0.0
    for i, length in enumerate([3, 5, 2, 4, 1, 4, 5, 3]):
        for t in range(length):
            w = float((step.out.logprobs.detach()[i, t] - step.batch.old_logprobs[i, t]).exp())
            total -= min(w * A[i], min(max(w, 0.8), 1.2) * A[i])
    assert loss("algo=dr_grpo")[0] == pytest.approx(total / (8 * 5), abs=1e-7)  # ratios near 1 in float64


def test_the_constant_is_the_configured_length_and_not_the_width():
    assert loss("algo=dr_grpo", const_len=10)[0] == pytest.approx(loss("algo=dr_grpo")[0] / 2, abs=1e-9)


@pytest.mark.parametrize("right", [1, 2, 4, 7])
def test_gradient_of_binary_rewards(right):
    """On-policy: p (1 - p) (mean score of the right minus that of the wrong), C times over; theta is one number."""
    G, T = 8, 4
    generator = torch.Generator().manual_seed(right)
    score = torch.randn(G, T, generator=generator, dtype=torch.float64)  # d logp / d theta of each token
    lengths = torch.randint(1, T + 1, (G,), generator=generator).tolist()
    logprobs = -torch.rand(G, T, generator=generator, dtype=torch.float64)
    tables = {name: logprobs for name in ("logprobs", "old_logprobs", "ref_logprobs", "entropy")}
    step = assemble(lengths, [3] * G, [1.0] * right + [0.0] * (G - right), tables, logprobs)
    _, gradient = loss("algo=dr_grpo", step=step, const_len=T)
    S = (score * step.batch.mask).sum(1)  # [G] score of a completion
    p = right / G
    expected = -p * (1 - p) * (S[:right].mean() - S[right:].mean()) / T  # the loss is minimised
    assert float((gradient * score).sum()) == pytest.approx(float(expected), abs=1e-7)  # advantages in float32


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9), st.floats(-3, 3), st.floats(-3, 3))
@settings(max_examples=60, deadline=None)
def test_linear_in_the_rewards_and_zero_in_sum(rewards, scale, shift):
    plain = advantage_of("algo=dr_grpo", rewards=rewards)
    mapped = advantage_of("algo=dr_grpo", rewards=[scale * r + shift for r in rewards])
    torch.testing.assert_close(mapped, scale * plain, rtol=0, atol=1e-7)  # spreads below 1e-8 count as none
    assert float(plain.sum()) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "opo", "max_rl", "passk", "bnpo", "gdpo", "mgpo"])
@pytest.mark.parametrize("value, size", [(0.1, 7), (0.7, 13), (0.95, 8)])
def test_equal_rewards_give_exactly_zero(name, value, size):
    """Whether the numbers were born in float64 or in float32, where 0.1 is another number."""
    assert advantage_of(f"algo={name}", rewards=[value] * size).tolist() == [0.0] * size
    short = torch.tensor([value] * size, dtype=torch.float32).double().tolist()
    assert advantage_of(f"algo={name}", rewards=short).tolist() == [0.0] * size


def test_a_row_without_a_reward_leaves_its_group():
    assert advantage_of("algo=dr_grpo", rewards=[1, 0, None, None]).tolist() == [0.5, -0.5, 0, 0]
    assert advantage_of("algo=dr_grpo", rewards=[1, None]).tolist() == [0, 0]


def test_two_aggregations_are_refused():
    with pytest.raises(UserError, match="aggregation"):
        compose("algo=[dr_grpo,aggregation]")


def test_the_file_is_small():
    """The smallest advantage of the zoo: 15 lines of code at most."""
    code = inspect.getsource(dr_grpo).split('"""\n', 1)[1].splitlines()
    assert len([line for line in code if line.strip() and not line.strip().startswith(("#", '"""'))]) <= 15


def test_the_worked_example_is_the_one_that_other_tests_name():
    assert fixture().rewards.total.tolist() == F1["rewards"]
    assert fixture().rollouts.group_id.tolist() == F1["groups"]
