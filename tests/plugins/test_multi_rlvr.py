"""Multi-RLVR: the sheet's numbers, repeats, and that it differs from VPO in the weights alone."""

import pytest
from answer_sets import COMPROMISE, SHEET, SPECIALISTS, advantages, composed, ragged, set_rewards, step_with
from grpozoo_plugins.multi_rlvr import MultiRlvr

from grpozoo import UserError
from grpozoo.rewards.answers import ask
from grpozoo.testing import check_plugin, compose

PAPER = ("algo=multi_rlvr", "plugins.grpo.ddof=0", "plugins.grpo.eps=1e-6")
SUM = "plugins.multi_rlvr.reduce=sum"


@pytest.mark.parametrize("options", [[], [SUM, "plugins.multi_rlvr.distinct=true"]])
def test_conformance(options):
    assert "transform" in check_plugin("multi_rlvr", "algo=multi_rlvr", *options, step=ragged())


@pytest.mark.parametrize(
    "options, R, A",
    [
        ([], [1 / 3, 0.6, 0.6, 0], [-0.202720, 0.878455, 0.878455, -1.554190]),
        ([SUM], [1.0, 1.2, 0.933333, 0], [0.468183, 0.900351, 0.324126, -1.692660]),
    ],
)
def test_the_worked_example(options, R, A):
    run = composed(*PAPER, *options)
    assert set_rewards(run, SHEET) == pytest.approx(R, abs=1e-6)
    assert advantages(run, SHEET) == pytest.approx(A, abs=1e-6)


def test_repeats_count_unless_they_are_told_not_to():
    """Twice .6 and once 0; the three specialists have different vectors of one sum, and stay three."""
    run = composed(*PAPER, SUM, "plugins.multi_rlvr.distinct=true")
    assert set_rewards(run, [COMPROMISE, SPECIALISTS, []]) == pytest.approx([0.6, 1.0, 0.0])


def test_it_asks_for_the_same_answers_as_vpo():
    ours, theirs = composed("algo=multi_rlvr"), composed("algo=vpo")
    prompts = ours.prompts(3)
    assert prompts == theirs.prompts(3) == [ask(prompt, 3) for prompt in ours.task.train[:3]]


def test_with_one_component_it_is_vpo():
    sets = [[[0.2], [0.7]], [[0.4]], []]
    assert set_rewards(composed("algo=multi_rlvr"), sets) == set_rewards(composed("algo=vpo"), sets) == [0.7, 0.4, 0.0]


def test_the_weights_of_rewards_are_the_target_of_answers_in_tags():
    run = composed(
        "algo=multi_rlvr", "reward=[answer,format]", "plugins.answer.weight=0.5", "plugins.format.pattern=a+"
    )
    step = step_with([SPECIALISTS])
    from dataclasses import replace

    text = f"<answer_1>aa</answer_1><answer_2>{step.rollouts.prompts[0].answer}</answer_2>"
    assert run.score(replace(step.rollouts, text=(text,))).total.tolist() == [1.0]
    run.plugins["format"].config.weight = 0.25
    assert run.score(replace(step.rollouts, text=(text,))).total.tolist() == [0.5]


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="answers"):
        MultiRlvr.Config(answers=0)


@pytest.mark.parametrize("other", ["gdpo", "process", "random_weighting"])
def test_what_it_does_not_stack_with(other):
    with pytest.raises(UserError, match="multi_rlvr"):
        compose(f"algo=[multi_rlvr,{other}]")
