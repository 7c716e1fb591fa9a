"""Random weighting: weights belong to prompts, rows without answers earn 0, rows without rewards leave."""

from dataclasses import replace

import numpy as np
import pytest
from answer_sets import composed, matrices, ragged, shaped, step_with
from group_steps import step_of

from grpozoo import Prompt, UserError
from grpozoo.rng import stream
from grpozoo.testing import Context, check_plugin, compose

UNIT = np.eye(3).tolist()


def test_conformance():
    assert "transform" in check_plugin("random_weighting", "algo=random_weighting", step=ragged())


def weights_of(run, ids):
    """w of each prompt, read off three rows that hold one unit vector each."""
    prompts = [name for name in ids for _ in range(3)]
    step = step_with([[line] for _ in ids for line in UNIT], [i for i in range(len(ids)) for _ in range(3)])
    rollouts = replace(step.rollouts, prompts=tuple(Prompt(name, text="?") for name in prompts))
    return shaped(run, step._replace(rollouts=rollouts)).total.numpy().reshape(-1, 3)


def test_a_prompt_keeps_its_weights_and_its_completions_share_them():
    run = composed("algo=random_weighting")
    first = weights_of(run, ["a", "b", "a"])
    assert np.allclose(first.sum(1), 1) and (first > 0).all()
    assert (first[0] == first[2]).all() and (first[0] != first[1]).all()
    assert (weights_of(Context(*compose("algo=random_weighting"), step=7), ["b", "a"]) == first[[1, 0]]).all()
    assert (weights_of(composed("algo=random_weighting", "seed=1"), ["a"]) != first[0]).all()
    assert first[0].tolist() == stream(0, "random_weighting", "a").dirichlet([1.0] * 3).tolist()


def test_weights_are_uniform_on_the_simplex():
    """Mean 1/3, variance (1/3)(2/3) / 4 = 1/18 over 2000 prompts; four standard errors."""
    found = weights_of(composed("algo=random_weighting"), [f"p{i}" for i in range(2000)])
    assert np.allclose(found.mean(0), 1 / 3, rtol=0, atol=4 * (1 / 18 / 2000) ** 0.5)
    assert np.allclose(found.var(0), 1 / 18, rtol=0, atol=0.006)


def test_the_best_answer_counts_none_is_0_and_no_reward_is_none():
    run = composed("algo=random_weighting")
    found = shaped(run, step_with([UNIT[:1], UNIT, [], None])).total.tolist()
    w = stream(0, "random_weighting", "p0").dirichlet([1.0] * 3)
    assert found == pytest.approx([w[0], w.max(), 0.0, float("nan")], nan_ok=True)
    assert run.plugins["random_weighting"].logged == [
        ("random_weighting/weighted", pytest.approx((w[0] + w.max()) / 3), 3)
    ]


def test_without_a_vector_the_rewards_are_the_components():
    run = composed("algo=random_weighting", "reward=[answer,format]", "plugins.format.pattern=a")
    step = step_of([0, 0, 0])
    texts = (step.rollouts.prompts[0].answer, "a", "b")
    w = stream(0, "random_weighting", "p0").dirichlet([1.0] * 2)
    assert run.score(replace(step.rollouts, text=texts)).total.tolist() == pytest.approx([*w, 0.0])


def test_in_evaluation_the_total_stays():
    run, step = composed("algo=random_weighting"), step_with([UNIT, UNIT])
    step = step._replace(rollouts=replace(step.rollouts, tag=("eval",) * 2))
    assert shaped(run, step).total.tolist() == [0.0, 0.0]


def test_a_vector_may_be_named():
    run = composed("algo=random_weighting", "plugins.random_weighting.component=one")
    step = step_of([0.0], vectors={"one": matrices([[[0.25]]]), "two": matrices([[[0.5]]])})
    assert shaped(run, step).total.tolist() == [0.25]


@pytest.mark.parametrize("other", ["gdpo", "process", "vpo", "multi_rlvr"])
def test_what_it_does_not_stack_with(other):
    with pytest.raises(UserError, match="random_weighting"):
        compose(f"algo=[random_weighting,{other}]")
