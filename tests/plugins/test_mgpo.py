"""MGPO's weights, and that it multiplies whichever advantage is active by them."""

import math
from dataclasses import replace

import pytest
import torch
from group_steps import advantage_of, run_of, step_of
from grpozoo_plugins.mgpo import Mgpo

from grpozoo.testing import advantages, check_plugin, compose, loss

OFF = "plugins.mgpo.gamma=0"


@pytest.mark.parametrize("algo", ["mgpo", "[rloo,mgpo]"])
def test_conformance(algo):
    check_plugin("mgpo", f"algo={algo}")


@pytest.mark.parametrize(
    "right, size, weights",
    [
        (1, 8, {1: 0.728785, 2: 0.531127, 4: 0.282096}),  # D = 0.316377 nats
        (7, 8, {1: 0.728785, 2: 0.531127, 4: 0.282096}),
        (1, 4, {1: 0.877383, 2: 0.769800, 4: 0.592593}),  # D = 0.130812
        (3, 4, {1: 0.877383, 2: 0.769800, 4: 0.592593}),
        (2, 4, {1: 1.0, 2: 1.0, 4: 1.0}),
    ],
)
def test_weights_by_accuracy(right, size, weights):
    """On centred rewards 1 and 0: A of the right ones is w (1 - p)."""
    p = right / size
    for gamma, w in weights.items():
        rewards = [1] * right + [0] * (size - right)
        found = advantage_of("algo=[dr_grpo,mgpo]", f"plugins.mgpo.gamma={gamma}", rewards=rewards).tolist()
        assert found == pytest.approx([w * (1 - p)] * right + [-w * p] * (size - right), abs=1e-6)


def test_advantages_of_the_worked_example():
    """Group 0 is half right, w = 1; in group 1 one of four is, the reward .5 is not: w = 0.877383."""
    grpo, found = advantages(), advantages("algo=mgpo")
    assert found[:4].tolist() == grpo[:4].tolist()
    assert found[4:].tolist() == pytest.approx([-0.687154, 0.229051, 1.145256, -0.687154], abs=1e-6)


def test_gamma_0_is_off():
    value, gradient = loss("algo=mgpo", OFF)
    plain, expected = loss()
    assert value == plain
    assert torch.equal(gradient, expected)


def test_accuracy_is_that_of_the_verdicts_and_not_of_the_shaped_total():
    """The total says [1, .2, .2, .2], the verdicts two of four: w = 1."""
    step = step_of([1, 0.2, 0.2, 0.2])
    verdicts = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    step = step._replace(rewards=replace(step.rewards, components={"answer": verdicts}))
    assert advantage_of("algo=[dr_grpo,mgpo]", step=step).tolist() == pytest.approx([0.6, -0.2, -0.2, -0.2], abs=1e-12)


def test_rows_without_a_verdict_do_not_count_and_a_group_of_them_is_left_alone():
    step = step_of([1, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 1])
    answers = torch.tensor([1, 0, math.nan] + [math.nan] * 3, dtype=torch.float64)
    step = step._replace(rewards=replace(step.rewards, components={"answer": answers}))
    plain = advantage_of("algo=dr_grpo", step=step)
    assert advantage_of("algo=[dr_grpo,mgpo]", step=step).tolist() == plain.tolist()  # p = 1/2, and unknown
    answers = torch.tensor([1, 0, 0] + [math.nan] * 3, dtype=torch.float64)
    step = step._replace(rewards=replace(step.rewards, components={"answer": answers}))
    found = advantage_of("algo=[dr_grpo,mgpo]", step=step)
    D = math.log(2 / 3) / 3 + 2 / 3 * math.log(4 / 3)  # p = 1/3
    assert found.tolist() == pytest.approx(
        [math.exp(-D) * A for A in plain[:3].tolist()] + plain[3:].tolist(), abs=1e-12
    )


def test_advantages_of_tokens_are_weighted_by_row():
    """The wrapper around an answer [R, T]; p = 1/4."""
    run, step = run_of("algo=mgpo"), step_of([1, 0, 0, 0])
    wrapper = run.plugins["mgpo"].advantage(rollouts=step.rollouts, rewards=step.rewards, run=run)
    next(wrapper)
    with pytest.raises(StopIteration) as ended:
        wrapper.send(torch.ones(4, 2, dtype=torch.float64))
    torch.testing.assert_close(ended.value.value, torch.full((4, 2), 0.877383, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("algo", ["[mgpo,rloo]", "[rloo,mgpo]"])
def test_it_applies_after_the_advantage_whatever_the_order_of_the_command_line(algo):
    assert compose(f"algo={algo}")[1].answering()["advantage"] == ["rloo", "mgpo"]


def test_a_gamma_below_zero_is_refused():
    with pytest.raises(ValueError, match="gamma"):
        Mgpo.Config(gamma=-1.0)
