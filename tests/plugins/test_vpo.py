"""VPO: the sheet's numbers, what its set reward must satisfy, prompts that ask for several answers, and what it learns."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
import torch
from answer_sets import (
    COMPROMISE,
    MIXED,
    SHEET,
    SPECIALISTS,
    Slots,
    W,
    advantages,
    composed,
    matrices,
    ragged,
    set_rewards,
    shaped,
    step_with,
)
from grpozoo_plugins.vpo import Sampler, Vpo, naive, sobol
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo import Plugin, Prompt, Request, Rewards, UserError, hookimpl
from grpozoo.compose.plugins import register
from grpozoo.rewards.answers import INSTRUCTION, ask, asked, split, vector_name
from grpozoo.testing import Context, check_plugin, compose, loss

PAPER = ("algo=vpo", "plugins.grpo.ddof=0", "plugins.grpo.eps=1e-6")
GIVEN = {"weights": lambda d, stream: torch.tensor(W, dtype=torch.float64)}
CLOSE = {"abs": 1e-6}


@pytest.mark.parametrize("options", [[], ["plugins.vpo.sampler=sobol"], ["plugins.vpo.answers=1"]])
def test_conformance(options):
    assert {"transform", "prompts", "evaluate"} <= set(check_plugin("vpo", "algo=vpo", *options, step=ragged()))


# The worked example


def test_the_worked_example():
    """Per weight the best of M1 is .7 .8 .6 .5, of M2 .6, of M3 .7 .6 .6 .6; the mean of R is .46875, its std0 .271210."""
    run = composed(*PAPER, **GIVEN)
    assert set_rewards(run, SHEET) == pytest.approx([0.65, 0.6, 0.625, 0.0], **CLOSE)
    assert advantages(run, SHEET) == pytest.approx([0.668300, 0.483941, 0.576120, -1.728361], **CLOSE)
    assert advantages(run, SHEET[:3]) == pytest.approx([1.224685, -1.224685, 0.0], **CLOSE)


def test_weights_of_a_seed():
    drawn = naive(np.random.default_rng(0), 4, 3, 1.0)
    assert drawn[0].tolist() == pytest.approx([0.395462, 0.593018, 0.011520], **CLOSE)
    run = composed(*PAPER, weights=lambda d, stream: torch.from_numpy(drawn))
    found = set_rewards(run, [SPECIALISTS, [[0.6, 0.6, 0.6]], MIXED])
    assert found == pytest.approx([0.662868, 0.600000, 0.612051], **CLOSE)


EXACT = [
    ([[1, 0], [0, 1]], 0.75),
    ([[0.6, 0.6]], 0.6),
    ([[1, 0], [0.6, 0.6]], 0.68),
    ([[1, 0], [0, 1], [0.6, 0.6]], 0.76),
    ([[0.9, 0.2], [0.3, 0.8]], 0.70),
    *[(np.eye(d).tolist(), sum(1 / i for i in range(1, d + 1)) / d) for d in (2, 3, 4, 5)],  # H_d / d
]


@pytest.mark.parametrize("M, expected", EXACT)
@pytest.mark.parametrize("sampler, tolerance", [("naive", 0.012), ("sobol", 0.0015)])
def test_expectations_at_alpha_1(M, expected, sampler, tolerance):
    """4096 draws; the std of max_i w M_i is below .2, so naive is within 4 standard errors of .0031."""
    run = composed("algo=vpo", f"plugins.vpo.sampler={sampler}", "plugins.vpo.draws=4096")
    assert set_rewards(run, [M]) == pytest.approx([expected], abs=tolerance)


def test_alpha_moves_between_coverage_and_the_uniform_mean():
    M = [[0.9, 0.2, 0.1], [0.3, 0.8, 0.3], [0.5, 0.5, 0.5]]
    for sampler in ("naive", "sobol"):
        for alpha, expected in ((0.01, 0.7275), (0.1, 0.6885), (1, 0.5734), (10, 0.5076), (1000, 0.5)):
            run = composed(
                "algo=vpo", f"plugins.vpo.alpha={alpha}", "plugins.vpo.draws=8192", f"plugins.vpo.sampler={sampler}"
            )
            assert set_rewards(run, [M]) == pytest.approx([expected], abs=0.008)  # 4 errors of .18 / sqrt(8192)


# Weights


@given(st.integers(2, 6), st.integers(1, 130), st.sampled_from([0.01, 0.3, 1.0, 3.0, 1000.0]), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_weights_lie_on_the_simplex(d, K, alpha, seed):
    for draw in (naive, sobol):
        drawn = draw(np.random.default_rng(seed), K, d, alpha)
        assert drawn.shape == (K, d) and drawn.dtype == np.float64 and (drawn >= 0).all()
        assert np.allclose(drawn.sum(1), 1, rtol=0, atol=1e-9)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 3.0])
def test_sobol_weights_have_the_moments_of_the_dirichlet(alpha):
    """Mean 1/d, variance (1/d)(1 - 1/d) / (d alpha + 1)."""
    drawn = sobol(np.random.default_rng(1), 2**13, 4, alpha)
    assert np.allclose(drawn.mean(0), 1 / 4, rtol=0, atol=2e-3)
    assert np.allclose(drawn.var(0), 3 / 16 / (4 * alpha + 1), rtol=0, atol=2e-3)


def test_a_line_that_underflows_is_uniform():
    class Zeros:
        def dirichlet(self, alpha, K):
            return np.full((K, len(alpha)), np.nan)

    assert naive(Zeros(), 2, 4, 1e-9).tolist() == [[0.25] * 4] * 2
    assert np.allclose(sobol(np.random.default_rng(0), 64, 2, 1e-4).sum(1), 1)


def test_sobol_is_at_least_twice_as_exact():
    """Advantages of random matrices, G = 8, m = 3, d = 4, K = 64, against a long sobol sequence."""
    rng, errors = np.random.default_rng(2), {name: 0.0 for name in ("naive", "sobol")}
    exact = composed(*PAPER, "plugins.vpo.draws=65536", "plugins.vpo.sampler=sobol")
    runs = {name: composed(*PAPER, "plugins.vpo.draws=64", f"plugins.vpo.sampler={name}") for name in errors}
    for _ in range(24):
        sets = rng.random((8, 3, 4)).tolist()
        truth = np.array(advantages(exact, sets))
        for name, run in runs.items():
            errors[name] += ((np.array(advantages(run, sets)) - truth) ** 2).mean()
    assert errors["sobol"] < errors["naive"] / 4  # squares


def seen_by(run, sets, groups=None):
    """The streams' first numbers, one for each group."""
    seen = []

    def weights(d, stream):
        seen.append(stream().random())
        return torch.full((1, d), 1 / d, dtype=torch.float64)

    run.plugins["vpo"].weights = weights
    set_rewards(run, sets, groups)
    return seen


def test_each_group_and_step_has_weights_of_its_own_and_they_come_again():
    sets, groups = [SPECIALISTS] * 4, [3, 3, 9, 9]
    first = seen_by(composed("algo=vpo"), sets, groups)
    assert len(set(first)) == 2 and first == seen_by(composed("algo=vpo"), sets, groups)
    assert first[1:] == seen_by(composed("algo=vpo"), sets[2:], groups[2:])  # whatever other groups there are
    later = Context(*compose("algo=vpo"), step=2)
    assert not set(first) & set(seen_by(later, sets, groups))
    assert not set(first) & set(seen_by(composed("algo=vpo", "seed=1"), sets, groups))


# Invariants

UNIT = st.floats(0, 1)
SETS = st.lists(st.lists(st.tuples(UNIT, UNIT, UNIT), min_size=1, max_size=4), min_size=2, max_size=6)
RUN, RUN_PAPER = composed("algo=vpo"), composed(*PAPER)


@given(SETS)
@settings(max_examples=60, deadline=None)
def test_the_reward_lies_between_best_compromise_and_coverage(sets):
    """Of the weights drawn: max_i wbar r_i <= R <= sum_j wbar_j max_i r_ij."""
    drawn = torch.from_numpy(naive(np.random.default_rng(3), 100, 3, 1.0))
    found = set_rewards(composed_with(drawn), sets)
    wbar = drawn.mean(0)
    for R, M in zip(found, matrices(sets), strict=True):
        assert float((M @ wbar).max()) - 1e-9 <= R <= float(M.amax(0) @ wbar) + 1e-9


def composed_with(drawn):
    RUN.plugins["vpo"].weights = lambda d, stream: drawn
    return RUN


@given(SETS, st.floats(0.1, 5), st.floats(0, 2), st.randoms())
@settings(max_examples=60, deadline=None)
def test_permutation_repetition_addition_and_scale(sets, a, b, random):
    run = composed_with(torch.from_numpy(naive(np.random.default_rng(4), 64, 3, 1.0)))
    plain = set_rewards(run, sets)
    turned = [random.sample(M, len(M)) for M in sets]
    assert set_rewards(run, turned) == pytest.approx(plain, abs=1e-12)
    assert set_rewards(run, [M + M[:1] for M in sets]) == pytest.approx(plain, abs=1e-12)
    more = set_rewards(run, [M + [(0.5, 0.2, 0.9)] for M in sets])
    assert all(new >= old - 1e-12 for new, old in zip(more, plain, strict=True))
    moved = [[[a * r + b for r in line] for line in M] for M in sets]
    assert set_rewards(run, moved) == pytest.approx([a * R + b for R in plain], abs=1e-9)


@given(SETS)
@settings(max_examples=40, deadline=None)
def test_advantages_are_centred_and_of_unit_variance(sets):
    A, R = np.array(advantages(RUN_PAPER, sets)), np.array(set_rewards(RUN_PAPER, sets))
    assert abs(A.sum()) < 1e-8
    if R.std() > 1e-3:
        assert A.std() == pytest.approx(1, abs=2e-3)  # eps / std


@given(st.lists(st.tuples(UNIT, UNIT, UNIT), min_size=1, max_size=4), st.integers(2, 9))
@settings(max_examples=30, deadline=None)
def test_equal_completions_have_advantage_exactly_zero(M, G):
    assert advantages(RUN_PLAIN, [M] * G) == [0.0] * G


RUN_PLAIN = composed("algo=vpo", "plugins.grpo.eps=0")


def test_shared_weights_keep_the_noise_of_near_copies_small():
    """Noise .01 on one set: RMS error .18 with K = 100 shared weights, 1.02 if every completion had its own."""
    rng = np.random.default_rng(6)
    exact, run = composed(*PAPER, "plugins.vpo.draws=65536", "plugins.vpo.sampler=sobol"), composed(*PAPER)
    squares = []
    for _ in range(40):
        sets = (rng.random((1, 3, 4)) + rng.normal(0, 0.01, (8, 3, 4))).tolist()
        squares.append(((np.array(advantages(run, sets)) - advantages(exact, sets)) ** 2).mean())
    assert np.mean(squares) ** 0.5 < 0.35


def test_collinear_rewards_give_the_best_of_m():
    """c-sets {.1 .9 .3}, {.5 .5 .5}, {.2 .1 .7}: R = c_max times wbar v; .9 .5 .7 standardised."""
    v = np.array([0.2, 0.5, 0.9])
    sets = [[(c * v).tolist() for c in row] for row in ([0.1, 0.9, 0.3], [0.5, 0.5, 0.5], [0.2, 0.1, 0.7])]
    assert advantages(composed(*PAPER), sets) == pytest.approx([1.224731, -1.224731, 0.0], abs=3e-5)  # eps / std


def test_one_component_is_the_best_of_m_and_one_answer_the_exact_mean():
    assert set_rewards(composed("algo=vpo"), [[[0.2], [0.7]], [[0.4]]]) == [0.7, 0.4]
    alone = composed("algo=vpo", "plugins.vpo.answers=1")
    assert set_rewards(alone, [[[1, 0, 0.5]], [[0.25, 0.5, 0]]]) == pytest.approx([0.5, 0.25], abs=1e-12)


def test_it_is_grpo_on_the_set_reward_bit_for_bit():
    run, step = composed(*PAPER), ragged()
    rewards = shaped(run, step)
    A = run.hooks.advantage(rollouts=step.rollouts, rewards=rewards, run=run)
    total = rewards.total
    plain = step._replace(rewards=Rewards({"r": total.clone()}, {"r": 1.0}, total=total.clone()))
    grpo = composed("algo=grpo", *PAPER[1:])
    assert torch.equal(A, grpo.hooks.advantage(rollouts=step.rollouts, rewards=plain.rewards, run=grpo))
    value, gradient = loss(*PAPER, step=step._replace(rewards=rewards))
    same, expected = loss(*PAPER[1:], step=plain)
    assert value == same and torch.equal(gradient, expected)
    assert not gradient[~step.batch.mask].any() and gradient.abs().sum() > 0


# Rows without answers, rows without rewards


def test_a_row_without_answers_earns_0_and_one_without_a_reward_leaves_the_group():
    run = composed(*PAPER, **GIVEN)
    found = set_rewards(run, [SPECIALISTS, [], None, COMPROMISE])
    assert found == pytest.approx([0.65, 0.0, float("nan"), 0.6], nan_ok=True)
    A = advantages(run, [SPECIALISTS, [], None, COMPROMISE])
    assert A[1] < -1 and A[2] == 0  # counted, and not counted
    assert A[:2] + A[3:] == pytest.approx(advantages(run, [SPECIALISTS, [], COMPROMISE]), **CLOSE)
    assert advantages(run, [[], []] + [SPECIALISTS] * 2, [0, 0, 1, 1]) == [0.0] * 4
    assert not run.said and set_rewards(run, [[], []], d=3) == [0.0, 0.0]
    assert "a whole step without an answer" in run.said[0]


def test_where_rewards_are_negative_an_empty_completion_may_cost_more():
    run = composed(*PAPER, "plugins.vpo.empty_score=-2", **GIVEN)
    assert set_rewards(run, [[[-1, -1, -1]], []]) == pytest.approx([-1, -2])
    assert advantages(run, [[[-1, -1, -1]], []]) == pytest.approx([1, -1], abs=1e-5)


@pytest.mark.parametrize("name", ["vpo", "multi_rlvr"])
def test_groups_may_have_components_of_their_own_number(name):
    """Two test cases of one problem, four of another: each group as if it were alone."""
    two, four = [[[1, 0], [0, 1]], [[0.6, 0.6]]], [np.eye(4).tolist(), []]
    step = step_with([[[0.0]]] * 4, [0, 0, 1, 1])
    mixed = matrices(two) + matrices(four)
    step = step._replace(rewards=replace(step.rewards, vectors={"parts": mixed}))
    run = composed(f"algo={name}", *["plugins.vpo.draws=4096"] * (name == "vpo"))
    found = shaped(run, step).total.tolist()
    assert found == pytest.approx([0.75, 0.6, 25 / 48, 0] if name == "vpo" else [0.5, 0.6, 0.25, 0], abs=0.012)


def test_an_answer_without_a_reward_is_left_out():
    nan = float("nan")
    run = composed(*PAPER, **GIVEN)
    assert set_rewards(run, [[[0, 0, 1], [nan, 1, 1]], SPECIALISTS])[0] == pytest.approx(1.3 / 4)  # .1 .1 .6 .5


def test_in_evaluation_the_total_stays_what_the_rewards_made_it():
    run, step = composed("algo=vpo"), step_with([SPECIALISTS, MIXED])
    step = step._replace(rollouts=replace(step.rollouts, tag=("eval",) * 2))
    assert shaped(run, step).total.tolist() == [0.0, 0.0]


def test_it_logs_the_answers_and_the_reward():
    run = composed(*PAPER, **GIVEN)
    set_rewards(run, SHEET)
    logged = run.plugins["vpo"].logged
    assert [value for name, value, _ in logged if name == "vpo/answers"] == [3.0, 3.0, 3.0, 0.0]
    assert logged[-1] == ("vpo/set_reward", pytest.approx(0.46875), 4.0)


def test_the_vector_is_named_where_there_are_several():
    two = Rewards({}, {}, {"a": (), "b": ()})
    assert vector_name("vpo", "b", two) == "b" and vector_name("vpo", None, Rewards({}, {})) is None
    with pytest.raises(UserError, match=r"plugins.vpo.component: choose one of the vector rewards a, b"):
        vector_name("vpo", None, two)
    with pytest.raises(UserError, match=r"plugins.vpo.component 'c'"):
        vector_name("vpo", "c", two)


def test_rewards_that_have_no_part_are_named():
    run, step = composed("algo=vpo"), step_with([SPECIALISTS, MIXED])
    more = {"answer": step.rewards.total, "other": step.rewards.total}
    shaped(run, step._replace(rewards=replace(step.rewards, components=more, weights={"answer": 1.0, "other": 0.5})))
    assert any("answer, other have no part" in text for text in run.said)
    quiet = composed("algo=vpo")
    shaped(quiet, step)
    assert not quiet.said


# Answers in tags


class Letters(Plugin):
    """Two rewards of a text: the share of a, the share of b; nothing for a text with x."""

    @hookimpl
    def reward(self, rollouts):
        texts = rollouts.text
        share = {sign: [None if "x" in t else t.count(sign) / max(len(t), 1) for t in texts] for sign in "ab"}
        return {"a": share["a"], "b": share["b"]}


def lettered(*overrides):
    config, active = compose("algo=vpo", *overrides)
    letters = Letters(Letters.Config())
    letters.name = "letters"
    plugins = {name: plugin for name, plugin in active.plugins.items() if name != "answer"}
    return Context(config, register({**plugins, "letters": letters}))


def test_answers_in_tags_are_scored_each_by_itself():
    run = lettered()
    run.plugins["vpo"].weights = lambda d, stream: torch.tensor([[1.0, 0.0], [0.25, 0.75]], dtype=torch.float64)
    texts = (
        "so <answer_1>aa</answer_1> or <answer_2>\nbb </answer_2><ANSWER_3>ab</Answer_3>",  # best: a 1; b .75
        "<answer_2>ab</answer_2><answer_1>bb</answer",  # the first was cut off: .5, .5
        "aaaa",
        "<answer_1>x</answer_1>",
    )
    step = step_with([SPECIALISTS] * 4)
    rollouts = replace(step.rollouts, text=texts)
    found = run.score(rollouts).total.tolist()
    assert found == pytest.approx([(1 + 0.75) / 2, 0.5, 0.0, float("nan")], nan_ok=True)
    assert not run.plugins["vpo"].scoring
    with pytest.raises(UserError):  # what fails inside leaves no trace
        run.plugins["letters"].reward = hookimpl(lambda rollouts: 1 / 0)
        run.plugins["vpo"].score_tagged(rollouts, Rewards({"a": None}, {"a": 1.0}), Broken())
    assert not run.plugins["vpo"].scoring


class Broken:
    def score(self, rollouts):
        raise UserError("no")


def test_splitting():
    assert split("<answer_1>a</answer_1><answer_1>b</answer_1><answer_2> </answer_2><answer_3>c", 3) == ["a"]
    assert split("<answer_10>a</answer_10>", 3) == [] and split("whole", 1) == ["whole"]


# Prompts


def test_prompts_are_rewritten_to_ask_for_m_answers():
    plain = Prompt("p", text="2+2=", extra={"column": 1})
    got = ask(plain, 3)
    assert got.text == "2+2=" + INSTRUCTION.replace("{answers}", "3") and "<answer_3>" in got.text
    assert got.extra == {"column": 1, "answers": 3} and got.id == "p"
    assert ask(got, 3) is got and ask(plain, 1) is plain and asked(plain) == 1
    chat = Prompt("p", messages=({"role": "system", "content": "s"}, {"role": "user", "content": "u"}))
    assert [m["content"] for m in ask(chat, 2, "!{answers}").messages] == ["s", "u!2"]
    assert chat.messages[1]["content"] == "u"
    own = Prompt("p", text="1?", extra={"several": "{answers} of these?"})
    assert ask(own, 4).text == "4 of these?" and ask(ask(own, 4), 2).text == "2 of these?"
    with pytest.raises(UserError, match="asks for 3 answers"):
        ask(got, 2)
    with pytest.raises(UserError, match="no user message"):
        ask(Prompt("p", messages=({"role": "system", "content": "s"},)), 2)


def test_the_hook_rewrites_with_the_instruction_of_the_options():
    run = composed("algo=vpo", "plugins.vpo.answers=2", "plugins.vpo.instruction=' Twice ({answers}).'")
    assert [p.text[-11:] for p in run.prompts(2)] == [" Twice (2)."] * 2
    assert not run.said
    mine = [Prompt("p", text="?", extra={"answers": 1, "several": "{answers}?"})]
    (got,) = run.hooks.prepare_prompts(prompts=mine, run=run)
    assert got.text == "2?" and "task.answers=2" in run.said[0]


def test_evaluation_asks_again_where_prompts_ask_for_another_number():
    """Eight completions of one answer become three of three; prompts that ask for three already stay."""
    run = lettered()
    requests = []
    generate = run.generate

    def counted(asked_for, temperature=None):
        requests.extend(asked_for)
        return replace(rollouts := generate(asked_for), text=("<answer_1>a</answer_1>",) * len(rollouts))

    run.generate = counted
    rollouts = generate([Request(Prompt(f"p{i}", text="?"), i, tuple(range(8)), "eval") for i in (0, 1)])
    (found,) = run.hooks.evaluate(rollouts=rollouts, rewards=run.score(rollouts), run=run)
    assert [(asked(r.prompt), len(r.sample_ids), r.tag) for r in requests] == [(3, 3, "eval")] * 2
    assert found["vpo/best@1"] == pytest.approx(1 / 3) and found["vpo/best@9"] == 1.0  # one of three is there
    requests.clear()
    again = replace(rollouts, prompts=tuple(ask(prompt, 3) for prompt in rollouts.prompts))
    run.hooks.evaluate(rollouts=again, rewards=run.score(again), run=run)
    assert not requests


# Options, notices, stacking


def test_one_answer_is_said_to_be_grpo():
    config, active = compose("algo=vpo", "plugins.vpo.answers=1")
    assert any("answers=1" in text for text in active.hooks.validate(config=config, active=active) if text)
    config, active = compose("algo=vpo")
    assert not any(active.hooks.validate(config=config, active=active))


@pytest.mark.parametrize("options", [{"answers": 0}, {"draws": 0}, {"alpha": 0.0}, {"alpha": -inf}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Vpo.Config(**options)


@pytest.mark.parametrize("other", ["gdpo", "process", "multi_rlvr", "random_weighting"])
def test_what_it_does_not_stack_with(other):
    with pytest.raises(UserError, match=rf"vpo|{other}"):
        compose(f"algo=[vpo,{other}]")


def test_the_authors_configuration():
    _, active = compose("algo=vpo_paper")
    grpo = active.plugins["grpo"].config
    assert (grpo.ddof, grpo.eps, grpo.kl_coef, grpo.aggregation.name) == (0, 1e-6, 1e-3, "token_mean")
    assert active.plugins["vpo"].config == Vpo.Config() and active.plugins["dual_clip"].config.c == 3.0
    assert Vpo.Config().sampler is Sampler.naive


# What is learnt: no network, REINFORCE on the logits


@pytest.mark.parametrize("name, slots, best", [("vpo", {0, 1, 2}, 0.76), ("multi_rlvr", {2}, 0.6)])
def test_three_answers(name, slots, best):
    """(1,0), (0,1), (.6,.6): VPO fills its slots with all three, the scalar max with the compromise. 3 of the 10 seeds."""
    vectors = np.array([[1, 0], [0, 1], [0.6, 0.6]])
    run = composed(f"algo={name}", *PAPER[1:])
    exact = composed("algo=vpo", "plugins.vpo.draws=4096", "plugins.vpo.sampler=sobol")
    for seed in range(3):
        rng, policy = np.random.default_rng(seed), Slots(3, 3)
        for step in range(400):
            run.step = 400 * seed + step
            chosen = policy.sample(8, rng)
            policy.learn(chosen, np.array(advantages(run, vectors[chosen].tolist())), lr=0.2)
        final = policy.logits.argmax(1)
        assert set(final.tolist()) == slots
        assert set_rewards(exact, [vectors[final].tolist()]) == pytest.approx([best], abs=0.002)


def blocks(bits):
    """[..., 12] bits -> [..., 4]: a block of three is worth 1 with all bits on, else it pulls to none: .8 (2 - u) / 2."""
    u = bits.reshape(*bits.shape[:-1], 4, 3).sum(-1)
    return np.where(u == 3, 1.0, 0.8 * (2 - u) / 2)


@pytest.mark.parametrize(
    "overrides, low, high",
    [
        (["algo=vpo", "plugins.vpo.draws=64"], 1.0, 1.0),  # the perfect answer: 8 of 8 seeds; 3 of 8 with the max
        (["algo=multi_rlvr", "plugins.multi_rlvr.reduce=sum"], 0.75, 0.9),  # stuck where every block is off
    ],
)
def test_deceptive_blocks(overrides, low, high):
    """Four slots of 12 independent bits, G = 32, 500 steps: specialists in single blocks lead VPO to the perfect answer."""
    rng, logits, run = np.random.default_rng(2), np.zeros((4, 12)), composed(*overrides, *PAPER[1:])
    for run.step in range(1000, 1500):
        p = 1 / (1 + np.exp(-logits))
        bits = (rng.random((32, 4, 12)) < p).astype(float)
        A = np.array(advantages(run, blocks(bits).tolist()))
        logits += 0.3 * np.einsum("n,nsb->sb", A, bits - p) / len(A)
    best = blocks((logits > 0).astype(float)).mean(1).max()
    assert low <= best <= high
