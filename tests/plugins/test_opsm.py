"""OPSM: completions of negative advantage that the policy has left are dropped."""

from dataclasses import replace

import pytest
import torch
from grpozoo_plugins.opsm import Opsm

from grpozoo.testing import advantages, compose, fixture, loss

# F1: d_i = mean_t (ls - lp), nats per token, by hand from log of the sheet's geometric ratios:
# d = -log(s_i) - log(rho_i)/L_i; row 2: -.25 - .133333, row 7: .066667 + .222222
D = [-0.288889, 0.034, -0.383333, 0.095833, -0.48, 0.088333, -0.204, 0.288889]


def test_distances_of_the_worked_example():
    step = fixture()
    found = ((step.rollouts.logprobs - step.out.logprobs) * step.batch.mask).sum(1) / step.rollouts.lengths
    assert found.tolist() == pytest.approx(D, abs=1e-6)


@pytest.mark.parametrize("threshold, dropped", [(0.0, {1, 7}), (0.03, {1, 7}), (0.04, {7}), (0.28, {7}), (0.3, set())])
def test_rows_of_negative_advantage_beyond_the_threshold_have_no_gradient(threshold, dropped):
    """Signs of A: + - - + - + + -. Rows 3 and 5 are beyond 0 too, and stay because their advantage is positive."""
    plain_value, plain = loss("algo=grpo")
    value, gradient = loss("algo=opsm", f"plugins.opsm.threshold={threshold}")
    kept = torch.tensor([row not in dropped for row in range(8)])
    torch.testing.assert_close(gradient, plain * kept[:, None], rtol=0, atol=0)
    assert (value == plain_value) is (not dropped)


def test_the_sign_is_each_tokens_own():
    """Row 7 with advantages -1, 1, -1: the first and the last token are dropped."""
    A = torch.zeros(8, 5, dtype=torch.float64)
    A[7, :3] = torch.tensor([-1.0, 1.0, -1.0])
    plain = loss("algo=grpo", "plugins.grpo.clip=1", advantages=A)[1]
    gradient = loss("algo=opsm", "plugins.opsm.threshold=0.1", "plugins.grpo.clip=1", advantages=A)[1]
    assert plain[7, 0] > 0 and plain[7, 2] > 0
    assert gradient[7, 0] == 0 and gradient[7, 2] == 0 and gradient[7, 1] == plain[7, 1] != 0


def test_a_completion_that_nobody_sampled_is_kept():
    step = fixture()
    rollouts = replace(step.rollouts, policy=(*step.rollouts.policy[:7], "teacher"))
    given = step._replace(rollouts=rollouts, batch=replace(step.batch, rollouts=rollouts))
    gradient = loss("algo=opsm", "plugins.opsm.threshold=0.1", step=given)[1]
    torch.testing.assert_close(gradient, loss("algo=grpo")[1], rtol=0, atol=0)


def test_the_share_of_dropped_completions_is_logged():
    active = compose("algo=opsm", "plugins.opsm.threshold=0.03")[1]
    step = fixture()
    active.hooks.token_weights(batch=step.batch, out=step.out)
    assert active.plugins["opsm"].logged == [("opsm/dropped", pytest.approx(2 / 8), 8)]


def test_it_acts_under_gspo():
    """Rows 1 and 7 of GSPO; without a range row 7 has a gradient, too."""
    wide = ("plugins.gspo.clip=1", "plugins.gspo.clip_high=1e9")
    gradient = loss("algo=[gspo,opsm]", *wide, "plugins.opsm.threshold=0.03", advantages=advantages())[1]
    expected = loss("algo=gspo", *wide)[1]
    kept = torch.tensor([row not in (1, 7) for row in range(8)])
    torch.testing.assert_close(gradient, expected * kept[:, None], rtol=0, atol=1e-15)


def test_a_negative_threshold_is_refused():
    with pytest.raises(ValueError, match="threshold"):
        Opsm.Config(threshold=-0.1)
