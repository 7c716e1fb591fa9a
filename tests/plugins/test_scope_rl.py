"""SCOPE-RL: the numbers of the method sheet (sections 6 and 7), what is routed and replaced, and what the judge may do."""

import itertools
import json
import re
from dataclasses import replace
from functools import cache

import numpy
import processes
import pytest
import torch
from grpozoo_plugins.scope_rl import TAG
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_runs import digest, metrics, train

from grpozoo import Prompt, Request, UserError
from grpozoo.models.warm_start import ASSETS
from grpozoo.rewards.judge import LABELS, Judge
from grpozoo.tasks.arithmetic import Arithmetic, scaffold
from grpozoo.tasks.scaffold import scaffolded
from grpozoo.testing import Context, advantages, assemble, check_plugin, compose
from grpozoo.testing.example import TOKEN_FIELDS

NAN = float("nan")


def test_conformance():
    assert {"transform", "resample"} <= set(check_plugin("scope_rl", "algo=scope_rl"))
    done = check_plugin("scope_rl", "algo=scope_rl", "plugins.scope_rl.std_floor=0.05", "plugins.scope_rl.stage=qpr")
    assert {"row order", "equal rewards", "missing rewards", "transform"} <= set(done)


@cache
def composition():
    return compose("algo=scope_rl", "group_size=8", "prompts_per_step=2")


def plugin(**options):
    active = composition()[1]
    found = active.plugins["scope_rl"]
    found.config, found.logged, found.begun = found.Config(**options), [], False
    found.judge = Scripted()
    return found


def step_of(totals, groups=None):
    zeros = torch.zeros(len(totals), 1, dtype=torch.float64)
    ids = groups or [0] * len(totals)
    return assemble([1] * len(totals), ids, totals, dict.fromkeys(TOKEN_FIELDS, zeros), zeros)


def options(stage, **more):
    """Stage names as members, further options as they are."""
    return {"stage": type(composition()[1].plugins["scope_rl"].config.stage)[stage], **more}


# --- ASR: the prefix rule ----------------------------------------------------------------------------------------------

ENTRIES = [("1111", 1), ("1111", 0), ("1101", 1), ("0111", 1), ("1000", 0), ("0000", 0), ("1110", 0), ("1111", 1)]


def prefix_rewards(entries, **more):
    made = plugin(**more)
    return [made.prefix_reward([sign == "1" for sign in ok], bool(main)) for ok, main in entries]


def test_prefix_rewards_of_the_worked_example():
    """m = 4; of 1101 the prefix is 2: .5 * 2/4. Entries 3 and 4 have the right answer and a broken prefix."""
    assert prefix_rewards(ENTRIES) == pytest.approx([1, 0.5, 0.25, 0, 0.125, 0, 0.375, 1], abs=1e-12)
    assert prefix_rewards(ENTRIES, beta=0.3) == pytest.approx([1, 0.3, 0.15, 0, 0.075, 0, 0.225, 1], abs=1e-12)


@pytest.mark.parametrize(
    "ddof, expected",
    [
        (0, [1.567089, 0.247435, -0.412392, -1.072219, -0.742306, -1.072219, -0.082478, 1.567089]),
        (1, [1.465878, 0.231454, -0.385757, -1.002969, -0.694363, -1.002969, -0.077151, 1.465878]),
    ],
)
def test_advantages_of_the_routed_example(ddof, expected):
    found = advantages(
        "algo=scope_rl", "plugins.grpo.eps=1e-6", f"plugins.grpo.ddof={ddof}", step=step_of(prefix_rewards(ENTRIES))
    )
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


@given(st.text("01", min_size=1, max_size=8), st.booleans(), st.floats(0, 1), st.data())
@settings(max_examples=100, deadline=None)
def test_only_the_prefix_counts(ok, main, beta, data):
    """Section 7, property 1."""

    def R(ok, main):
        return prefix_rewards([(ok, main)], beta=beta)[0]

    L, m = (ok + "0").index("0"), len(ok)
    assert 0 <= R(ok, main) <= 1 and (m == L or beta == 0 or R(ok, main) < 1)
    later = data.draw(st.text("01", min_size=max(m - L - 1, 0), max_size=max(m - L - 1, 0)))
    assert R((ok[: L + 1] + later)[:m], main) == R(ok, main)
    assert R("1" * m, main) >= R(ok, main)
    assert m == L or R(ok, True) == R(ok, False)
    assert prefix_rewards([(ok, main)], beta=1.0)[0] == pytest.approx(L / m, abs=1e-12)
    assert prefix_rewards([(ok, main)], beta=0.0)[0] == float(m == L and main)
    assert prefix_rewards([("1" * m, True)], beta=beta)[0] == 1.0


@pytest.mark.parametrize("p, expected", [(0.1, 0.576), (0.3, 0.944), (0.5, 0.996), (0.8, 1.0)])
def test_the_share_of_groups_with_a_gradient(p, expected):
    """Section 6: independent sub-steps, m = 4, G = 8, 2000 groups; four standard errors. Outcomes alone: below .02 at .3."""
    draws, made = numpy.random.default_rng(0).random((2000, 8, 5)) < p, plugin()
    table = {ok: made.prefix_reward(list(ok[:4]), ok[4]) for ok in itertools.product((False, True), repeat=5)}
    spread = [len({table[tuple(bool(x) for x in row)] for row in group}) > 1 for group in draws]
    assert numpy.mean(spread) == pytest.approx(expected, abs=4 * (max(expected * (1 - expected), 1e-3) / 2000) ** 0.5)
    assert numpy.mean(spread) >= 1 - p**8 - (1 - p) ** 8 - 0.04  # the handy bound


# --- ASR: who is routed, and what becomes of the batch ------------------------------------------------------------------


FILLED = "S1:{0};S2:{1}#{answer}"


class Groups(Context):
    """Chains of four operands; which original completions are right is scripted, those with slots are answered as told."""

    def __init__(self, plan, slots=FILLED):
        super().__init__(*composition())
        self.task = Arithmetic(Arithmetic.Config(level=4, terms=4, train=8, heldout=4))
        self.plan, self.slots, self.asked = plan, slots, []  # plan: a string of 0 and 1 for each group

    def generate(self, requests, temperature=None):
        self.asked.append(requests)
        texts = [self.text(request, sample) for request in requests for sample in request.sample_ids]
        ids = [tuple(map(ord, request.prompt.text)) for request in requests for _ in request.sample_ids]
        made = super().generate(requests)
        return replace(made, text=tuple(texts), prompt_ids=tuple(ids))

    def text(self, request, sample):
        if request.tag == TAG:
            values = [answer for _, answer in scaffold(request.prompt)]
            return self.slots.format(*values, answer=request.prompt.answer) if sample % 2 else "S1:no"
        return f"#{request.prompt.answer}" if self.plan[request.group_id][sample] == "1" else "#x"


def sampled(plan, shuffle=None, slots=FILLED, **more):
    """(before, after as (rollouts, rewards), run, plugin); all groups of one size."""
    made = plugin(**options("asr", **more))
    run = Groups(plan, slots)
    requests = [Request(p, 10 + 7 * g, tuple(range(len(plan[0])))) for g, p in enumerate(run.prompts(len(plan)))]
    run.plan = {request.group_id: row for request, row in zip(requests, plan, strict=True)}
    rollouts = run.generate(requests)
    rollouts = rollouts.select(shuffle(list(range(len(rollouts)))) if shuffle else range(len(rollouts)))
    rewards = run.score(rollouts)
    made.logged.clear()
    after = composition()[1].hooks.resample(rollouts=rollouts, rewards=rewards, run=run)
    return (rollouts, rewards), after, run, made


def last(made, name):
    return [value for key, value, _ in made.logged if key == f"scope_rl/{name}"][-1]


def routed_groups(run):
    return [request.group_id for request in run.asked[1]] if len(run.asked) > 1 else []


def test_a_group_below_tau_is_routed_and_one_at_tau_is_not():
    """Section 6: of 8, 3 right (.375) route, 4 right (.5) do not."""
    _, _, run, made = sampled(["11100000", "11110000"])
    assert routed_groups(run) == [10] and last(made, "routed") == 0.5 and last(made, "accuracy") == 7 / 16


@given(st.lists(st.text("01", min_size=4, max_size=4), min_size=1, max_size=5), st.floats(0, 1), st.randoms())
@settings(max_examples=40, deadline=None)
def test_routed_groups_are_replaced_whole_and_nothing_else_changes(plan, tau, random):
    """Section 7, properties 2 and 3, with rows in any order."""
    before, (rollouts, rewards), run, made = sampled(plan, lambda rows: random.sample(rows, len(rows)), tau=tau)
    routed = {10 + 7 * g for g, row in enumerate(plan) if row.count("1") / 4 < tau}
    assert set(routed_groups(run)) == routed
    assert len(rollouts) == len(rewards.total) == len(before[0])
    assert rollouts.group_id.tolist() == before[0].group_id.tolist()
    assert rollouts.sample_id.tolist() == before[0].sample_id.tolist()
    for row, group in enumerate(rollouts.group_id.tolist()):
        old, new = before[0].prompts[row], rollouts.prompts[row]
        if group in routed:
            assert new.id == f"{old.id}/scaffold" and rollouts.tag[row] == TAG and new.answer == old.answer
            assert new.text.endswith(old.text) and new.text.startswith("S1:")
            assert rollouts.prompt_ids[row] == tuple(map(ord, new.text))
            assert rollouts.text[row].startswith("S1:")
        else:
            assert new is old and rollouts.tag[row] == "train" and rollouts.text[row] == before[0].text[row]
            assert float(rewards.total[row]) == float(before[1].total[row])
            assert torch.equal(rollouts.logprobs[row][rollouts.completion_mask[row]], before[0].logprobs[row][before[0].completion_mask[row]])  # fmt: skip
    lost = sum(int(before[0].lengths[row]) for row, g in enumerate(before[0].group_id.tolist()) if g in routed)
    assert last(made, "replaced") == lost
    if not routed:
        assert rollouts is before[0] and rewards is before[1]


def test_rewards_of_a_routed_group():
    """Odd samples answer everything (1), even ones fail at once (0): eta rises from 0 to 1."""
    _, (_, rewards), _, made = sampled(["0000", "1111"])
    assert rewards.total.tolist() == [0, 1, 0, 1, 1, 1, 1, 1]
    assert last(made, "eta_before") == 0 and last(made, "eta_after") == 0.5
    prefixes = [value for name, value, _ in made.logged if name == "scope_rl/prefix"]
    assert prefixes == [0, 1, 0, 1] and last(made, "stage") == 1


@pytest.mark.parametrize(
    "slots, reward",
    [
        ("S1:{0};S2:{1}#{answer}", 1.0),
        ("S1:a={0};S2:b={1}#{answer}", 1.0),  # the work stands in the slot
        ("S1:{0};S2:{1}#x", 0.5),
        ("S1:{0};S2:no#{answer}", 0.25),
        ("S1:no;S2:{1}#{answer}", 0.0),  # the answer alone pays nothing
        ("S2:{1}#{answer}", 0.0),
        ("#{answer}", 0.0),
        ("S1:no;S1:{0};S2:{1}#{answer}", 1.0),  # the last occurrence of a label counts
        ("S1:{0};S1:no;S2:{1}#{answer}", 0.0),
        ("S1:{0}", 0.25),  # truncated
    ],
)
def test_sub_answers_are_read_from_their_slots(slots, reward):
    _, (_, rewards), _, _ = sampled(["0000"], slots=slots)
    assert rewards.total.tolist() == [0, reward, 0, reward]


def test_other_rewards_stay_in_the_total():
    """Half a point for the format: 0.5 stays beside R, in ASR and in QPR."""
    made = plugin(**options("asr"))
    run = Groups({0: "00"})
    rollouts = run.generate([Request(run.prompts(1)[0], 0, (0, 1))])
    score = run.score
    run.score = lambda rows: replace(score(rows), total=score(rows).total + 0.5)
    _, rewards = composition()[1].hooks.resample(rollouts=rollouts, rewards=run.score(rollouts), run=run)
    assert rewards.total.tolist() == [0.5, 1.5]
    made.config = made.Config(**options("qpr"))
    step = step_of([1.0, 0.0])
    columns = {**step.rewards.components, "format": torch.tensor([1.0, 1.0]).double()}
    rewards = replace(step.rewards, components=columns, weights={"answer": 1.0, "format": 0.5})
    step = step._replace(rewards=rewards)
    shaped = transform(step, [["useful"] * 5])
    assert shaped.tolist() == pytest.approx([0.5 + 0.848050, 0.5], abs=1e-6)


def test_a_prompt_without_sub_questions_is_never_routed_and_it_is_said():
    made, run = plugin(**options("asr")), Groups({0: "00"})
    run.task = Arithmetic(Arithmetic.Config(level=4, train=4, heldout=2, terms=2))
    rollouts = run.generate([Request(run.prompts(1)[0], 0, (0, 1))])
    rewards = run.score(rollouts)
    after = composition()[1].hooks.resample(rollouts=rollouts, rewards=rewards, run=run)
    assert after[0] is rollouts and after[1] is rewards and len(run.asked) == 1
    assert "no prompt of step 2 has sub-questions under extra['scaffold']" in run.said[0]
    assert last(made, "routed") == 0


def test_a_prompt_that_would_be_too_long_is_not_routed():
    plugin(**options("asr"))
    run = Groups({0: "00"})
    prompt = run.prompts(1)[0]
    run.policy.encode = lambda prompt: list(prompt.text)
    longest = len(scaffolded(prompt, scaffold(prompt)).text)
    for limit, passes in ((longest, 2), (longest - 1, 1)):
        run.config, run.asked = replace(run.config, max_prompt_length=limit), []
        rollouts = run.generate([Request(prompt, 0, (0, 1))])
        composition()[1].hooks.resample(rollouts=rollouts, rewards=run.score(rollouts), run=run)
        assert len(run.asked) == passes


def test_the_second_pass_has_streams_of_its_own():
    from grpozoo.sampling import uniforms

    _, _, run, _ = sampled(["0000"])
    first, second = run.asked[0][0], run.asked[1][0]
    same_prompt = replace(second, prompt=first.prompt)
    assert (second.group_id, second.sample_ids) == (first.group_id, first.sample_ids)
    assert not numpy.array_equal(uniforms(0, 1, first, 0, 0, 4), uniforms(0, 1, same_prompt, 0, 0, 4))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("level", range(2, 7))
def test_the_model_sees_no_answer(level, chat):
    """Sheet 3.2, H: with other sub-answers and another answer the model sees the very same prompt."""
    task = Arithmetic(Arithmetic.Config(level=level, train=32, heldout=2, chat=chat))
    for prompt in task.train:
        chain = scaffold(prompt)
        seen = scaffolded(prompt, chain)
        fake = scaffolded(replace(prompt, answer="SECRET"), [(question, "SECRET") for question, _ in chain])
        assert (seen.text, seen.messages) == (fake.text, fake.messages)
        assert "SECRET" not in str((fake.text, fake.messages))
        shown = seen.text or seen.messages[-1]["content"]
        assert all(question in shown for question, _ in chain) and (seen.text is None) == chat


# --- QPR ----------------------------------------------------------------------------------------------------------------


class Scripted(Judge):
    """Answers are given beforehand, in the order of the calls."""

    def __init__(self, answers=()):
        super().__init__()
        self.answers, self.seen = list(answers), []

    def labels(self, pairs):
        self.seen += pairs
        return [self.answers.pop(0) for _ in pairs]


def counts(**numbers):
    return [label for label, count in numbers.items() for _ in range(count)]


ROWS = [  # correct, steps, S_u, Phi, kappa, R
    (1, counts(useful=5), 1.000000, 1.000000, 0.848050, 0.848050),
    (1, counts(useful=5, redundant=3, reversion=2), 0.500000, 0.765000, 0.806589, 0.308520),
    (1, counts(useful=5, mechanical=4, error=1), 0.500000, 0.760000, 0.806589, 0.306504),
    (0, counts(useful=6), 1.000000, 1.000000, 0.837107, 0.000000),
    (1, counts(useful=2), 1.000000, 1.000000, 0.901014, 0.901014),
    (1, counts(redundant=4), 0.000000, 0.500000, 0.861368, 0.000000),
    (1, counts(useful=10), 1.000000, 1.000000, 0.806589, 0.806589),
    (1, counts(useful=5, mechanical=1, redundant=1, reversion=1, error=2), 0.500000, 0.771637, 0.806589, 0.311197),
]


def transform(step, answers, tag=None, run=None):
    """Totals after transform_rewards."""
    config, active = composition()
    active.plugins["scope_rl"].judge = Scripted(answers)
    rollouts = step.rollouts if tag is None else replace(step.rollouts, tag=(tag,) * len(step.rollouts))
    run = run or Context(config, active)
    return active.hooks.transform_rewards(rollouts=rollouts, rewards=step.rewards, run=run).total


def test_quality_rewards_of_the_worked_example():
    made = plugin(**options("qpr"))
    step = step_of([float(row[0]) for row in ROWS])
    total = transform(step, [row[1] for row in ROWS if row[0]])
    assert total.tolist() == pytest.approx([row[5] for row in ROWS], abs=1e-6)
    assert float(total.mean()) == pytest.approx(0.435234, abs=1e-6)
    assert float(total.std(correction=0)) == pytest.approx(0.344990, abs=1e-6)
    assert len(made.judge.seen) == 7  # not for the wrong one
    found = advantages("algo=scope_rl", "plugins.grpo.eps=1e-6", "plugins.grpo.ddof=0", step=step_of(total.tolist()))
    expected = [1.196600, -0.367297, -0.373142, -1.261583, 1.350123, -1.261583, 1.076419, -0.359538]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert last(made, "zero") == pytest.approx(1 / 7) and last(made, "judge_failures") == 0
    numbers = [value for name, value, _ in made.logged if name == "scope_rl/steps"]
    assert numbers == [5, 10, 10, 2, 4, 10, 10]
    parts = [made.step_reward(row[1]) for row in ROWS]
    assert parts == pytest.approx([row[2] * row[3] * row[4] for row in ROWS], abs=2e-6)


LISTS = st.lists(st.sampled_from(LABELS), min_size=1, max_size=30)


@given(LISTS, st.randoms(), st.floats(0, 0.99), st.floats(0, 2))
@settings(max_examples=100, deadline=None)
def test_what_a_quality_reward_depends_on(labels, random, penalty, alpha):
    """Section 7, properties 4 and 5."""
    names = [f"lambda_{label}" for label in LABELS[1:]]
    made = plugin(**dict.fromkeys(names, penalty), alpha=alpha)
    R = made.step_reward(labels)
    assert 0 <= R <= 1
    assert made.step_reward(random.sample(labels, len(labels))) == R
    useful = labels.count("useful")
    assert (R == 0) == (useful == 0)
    assert plugin(**dict.fromkeys(names, 0.0), alpha=0.0).step_reward(labels) == useful / len(labels)
    for name in names:
        more = plugin(**{**dict.fromkeys(names, penalty), name: (1 + penalty) / 2}, alpha=alpha).step_reward(labels)
        strict = useful and name.removeprefix("lambda_") in labels
        assert more < R if strict else more == R
    all_useful = [plugin(alpha=0.1 + alpha).step_reward(["useful"] * n) for n in range(1, 20)]
    assert all(a > b for a, b in itertools.pairwise(all_useful))
    assert all_useful[4] == pytest.approx(1 / (1 + (0.1 + alpha) * numpy.log(6)), abs=1e-12)


@given(st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=1, max_size=10), st.data())
@settings(max_examples=60, deadline=None)
def test_a_wrong_answer_gets_nothing_and_a_failure_the_mean_of_its_siblings(totals, data):
    """R <= 1[correct]; a failed judgement is no opinion (3.7); a row without a reward stays without."""
    made = plugin(**options("qpr"))
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(totals), max_size=len(totals)))
    answers = data.draw(st.lists(LISTS | st.none(), min_size=totals.count(1.0), max_size=totals.count(1.0)))
    total = transform(step_of(totals, groups), list(answers)).tolist()
    own, queue = {}, list(answers)
    for row, value in enumerate(totals):
        if value == 1.0:
            own[row] = made.step_reward(found) if (found := queue.pop(0)) else None
    for row, value in enumerate(totals):
        siblings = [own[r] for r in own if groups[r] == groups[row] and own[r] is not None]
        if value != 1.0:
            assert total[row] == value or value != value and total[row] != total[row]
        elif own[row] is None:
            assert total[row] == pytest.approx(sum(siblings) / len(siblings) if siblings else 0.5, abs=1e-12)
        else:
            assert total[row] == pytest.approx(own[row], abs=1e-12) and total[row] <= 1  # 1 + (R - 1) rounds
    if answers:
        assert last(made, "judge_failures") == pytest.approx(answers.count(None) / len(answers))


def test_a_judge_that_never_answers_is_said():
    plugin(**options("qpr"))
    run = Context(*composition())
    assert transform(step_of([1.0, 0.0, 1.0]), [None, None], run=run).tolist() == [0.5, 0, 0.5]
    assert "the judge has no answer to any of 2 completions" in run.said[0]


def test_equal_counts_in_an_all_right_group_have_no_advantage():
    """Section 7, properties 6 and 7: one number for each completion, and 0 here."""
    plugin(**options("qpr"))
    labels = counts(useful=3, redundant=2)
    total = transform(step_of([1.0] * 4), [labels, labels[::-1], labels, labels])
    found = advantages("algo=scope_rl", step=step_of(total.tolist()))
    assert found.shape == (4,) and not found.any()


def test_evaluation_is_not_shaped():
    made = plugin(**options("mix"))
    assert transform(step_of([1.0, 0.0]), [], tag="eval").tolist() == [1, 0] and not made.judge.seen
    assert not made.logged


def test_a_prompt_with_sub_questions_is_not_judged_in_asr_and_gets_its_prefix_reward():
    """mix: the first completion answers one of two sub-questions and the problem, the second nothing."""
    made, step = plugin(**options("mix")), step_of([1.0, 0.0])
    prompt = scaffolded(Prompt("p", text="1+2+3=", answer="6", extra={"scaffold": [("1+2", "3"), ("x", "y")]}), [])
    rollouts = replace(step.rollouts, prompts=(prompt,) * 2, text=("S1:3;S2:no#6", "no"))
    assert transform(step._replace(rollouts=rollouts), []).tolist() == [0.25, 0] and not made.judge.seen


def test_a_reward_takes_the_weight_of_the_outcome():
    """Weights .5 for the answer and .3 for the format, always 1: right .5 R + .3, wrong .3; never the other way round."""
    plugin(**options("qpr"))
    step = step_of([1.0, 0.0, 1.0])
    ones = torch.ones(3).double()
    columns = {"format": ones, "answer": torch.tensor([1.0, 0.0, 1.0]).double()}
    rewards = replace(step.rewards, components=columns, weights={"format": 0.3, "answer": 0.5}, total=0.3 + 0.5 * columns["answer"])  # fmt: skip
    run = Context(*composition())
    run.verdicts = lambda rollouts, rewards: rewards.components["answer"]
    total = transform(step._replace(rewards=rewards), [["useful"] * 5, ["redundant"] * 4], run=run)
    assert total.tolist() == pytest.approx([0.3 + 0.5 * 0.848050, 0.3, 0.3], abs=1e-6)


def test_the_weight_is_that_of_the_named_outcome_whatever_the_batch_holds():
    """All wrong: a penalty that is never 1 agrees with every verdict, and is not the outcome."""
    made = plugin(**options("asr"))
    run, zeros = Context(*composition()), torch.zeros(2).double()
    rewards = replace(
        step_of([0.0, 0.0]).rewards,
        components={"answer": zeros, "overlong": zeros},
        weights={"answer": 1.0, "overlong": 3.0},
    )
    assert made.weight(rewards, run) == 1.0
    assert plugin(**options("asr"), outcome="overlong").weight(rewards, run) == 3.0
    with pytest.raises(UserError, match="which reward says what is right, of a, b.*outcome=NAME"):
        plugin(**options("asr")).weight(
            replace(rewards, components={"a": zeros, "b": zeros}, weights={"a": 1.0, "b": 1.0}), run
        )
    with pytest.raises(UserError, match="unknown reward in plugins.scope_rl.outcome.*'anser'.*answer"):
        plugin(**options("asr"), outcome="anser").weight(rewards, run)


def checked(*overrides):
    config, active = compose("algo=scope_rl", *overrides)
    active.hooks.validate(config=config, active=active)


def test_two_rewards_that_may_be_the_outcome_are_refused_before_a_model_loads():
    with pytest.raises(UserError, match="which reward says what is right, of answer, math"):
        checked("reward=[answer,math]")
    checked("reward=[answer,math]", "plugins.scope_rl.outcome=math")
    checked("reward=[answer,format]")


# --- stages, floor, refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage, switch, steps, expected",
    [
        ("asr", None, 10, "aaaaaaaaaa"), ("qpr", None, 10, "qqqqqqqqqq"), ("mix", None, 4, "mmmm"),
        ("schedule", None, 10, "aaaaaqqqqq"), ("schedule", None, 5, "aaqqq"), ("schedule", 3, 5, "aaaqq"),
        ("schedule", 0, 3, "qqq"), ("schedule", 9, 3, "aaa"),
    ],
)  # fmt: skip
def test_the_schedule(stage, switch, steps, expected):
    made, run = plugin(**options(stage, switch=switch)), Context(*composition())
    run.config = replace(run.config, steps=steps)
    letters = {(True, False): "a", (False, True): "q", (True, True): "m"}
    found = ""
    for run.step in range(steps):
        found += letters[made.stages(run)]
    assert found == expected
    notices = [note for note in composition()[1].hooks.validate(config=run.config, active=composition()[1]) if note]
    assert len(notices) == (stage == "schedule" and "q" not in expected)


def test_a_schedule_never_goes_back():
    """A run of 4 steps that came to QPR is resumed with 40: half of them would be ASR again."""
    made, run = plugin(), Context(*composition(), step=2)
    run.config = replace(run.config, steps=4)
    rollouts = run.generate([Request(run.prompts(1)[0], 0, (0, 1))])
    made.judge = Scripted([["useful"]] * 2)
    composition()[1].hooks.resample(rollouts=rollouts, rewards=run.score(rollouts), run=run)
    resumed = type(made)(made.config)
    resumed.load_state_dict(made.state_dict())
    run.config = replace(run.config, steps=40)
    assert resumed.stages(run) == (False, True) and type(made)(made.config).stages(run) == (True, False)


def test_the_floor_of_the_spread():
    """Totals .80 and .81: std0 .005; with a floor of .05 the advantages shrink to a tenth, larger spreads stay."""
    step = step_of([0.80, 0.81, 0.0, 1.0, 0.5, 0.5], [0, 0, 1, 1, 2, 2])
    bare = advantages("algo=scope_rl", "plugins.grpo.eps=0", step=step).tolist()
    floor = advantages("algo=scope_rl", "plugins.grpo.eps=0", "plugins.scope_rl.std_floor=0.05", step=step)
    assert floor.tolist() == pytest.approx([bare[0] / 10, bare[1] / 10, bare[2], bare[3], 0, 0], abs=1e-9)


@pytest.mark.parametrize(
    "given, message",
    [
        ("tau=1.5", "tau lies"), ("beta=-0.1", "beta lies"), ("lambda_error=1", "lambda_error lies"),
        ("alpha=-1", "alpha is at least 0"), ("std_floor=0", "std_floor is above 0"), ("workers=0", "workers is above"),
        ("judge=endpoint", "needs url and model"), ("url=http://localhost/v1", "judge=rule has neither"),
        ("switch=-1", "switch is a step"), ("stage=both", "stage"), ("workers=3", "are for judge=endpoint"),
        ("timeout=5", "are for judge=endpoint"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        compose("algo=scope_rl", f"plugins.scope_rl.{given}")


def test_a_switch_without_a_schedule_is_refused():
    with pytest.raises(UserError, match="of stage=schedule"):
        compose("algo=scope_rl", "plugins.scope_rl.stage=asr", "plugins.scope_rl.switch=3")


@pytest.mark.parametrize("stage, given", [("asr", "alpha=0"), ("asr", "lambda_error=0.1"), ("qpr", "tau=0.4"), ("qpr", "column=x")])  # fmt: skip
def test_options_of_the_other_stage_are_refused(stage, given):
    with pytest.raises(UserError, match=f"{given.partition('=')[0]} has no effect with stage={stage}"):
        compose("algo=scope_rl", f"plugins.scope_rl.stage={stage}", f"plugins.scope_rl.{given}")


@pytest.mark.parametrize("other", ["gdpo", "process", "vpo", "multi_rlvr", "random_weighting"])
def test_methods_that_do_not_read_totals_are_refused(other):
    with pytest.raises(UserError, match="scope_rl"):
        compose(f"algo=[scope_rl,{other}]")


def test_the_endpoint_is_built_from_its_options():
    _, active = compose(
        "algo=scope_rl", "plugins.scope_rl.judge=endpoint", "plugins.scope_rl.url=http://localhost:1/v1",
        "plugins.scope_rl.model=grader", "plugins.scope_rl.workers=3",
    )  # fmt: skip
    judge = active.plugins["scope_rl"].judge
    assert (judge.url, judge.model, judge.workers) == ("http://localhost:1/v1/chat/completions", "grader", 3)


# --- with other methods -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", ["gspo", "stare", "gspo,stare", "dynamic_sampling"])
def test_it_reaches_the_advantage_of_what_it_stacks_with(others):
    """The batch that is trained on is the replaced one, and comes before dynamic sampling."""
    _, active = compose(f"algo=[scope_rl,{others}]")
    order = active.answering()["resample"]
    assert order[: len(order)] == ["scope_rl", *(["dynamic_sampling"] if "dynamic" in others else [])]
    step = step_of(prefix_rewards(ENTRIES))
    given = ["plugins.grpo.eps=1e-6", "plugins.grpo.ddof=0"]
    found = advantages(f"algo=[scope_rl,{others}]", *given, step=step)
    assert torch.equal(found, advantages("algo=scope_rl", *given, step=step))


def test_dynamic_sampling_judges_repaired_groups():
    """All wrong at first: the second pass brings right and wrong answers, and the group is kept without another round."""
    config, active = compose("algo=[scope_rl,dynamic_sampling]", "prompts_per_step=1", "group_size=4", "plugins.scope_rl.stage=asr")  # fmt: skip
    run = Groups({0: "0000"})
    run.config, run.active, run.hooks, run.plugins = config, active, active.hooks, active.plugins
    rollouts = run.generate([Request(run.prompts(1)[0], 0, (0, 1, 2, 3))])
    after, rewards = active.hooks.resample(rollouts=rollouts, rewards=run.score(rollouts), run=run)
    assert set(after.tag) == {TAG} and rewards.total.tolist() == [0, 1, 0, 1] and len(run.asked) == 2


def test_dynamic_sampling_keeps_a_repaired_group_without_a_right_answer():
    """All answers are wrong, but every second first sub-answer is right: the rewards differ, so the group teaches."""
    config, active = compose("algo=[scope_rl,dynamic_sampling]", "prompts_per_step=1", "group_size=4", "plugins.scope_rl.stage=asr")  # fmt: skip
    run = Groups({0: "0000"}, slots="S1:{0};S2:no#no")
    run.config, run.active, run.hooks, run.plugins = config, active, active.hooks, active.plugins
    rollouts = run.generate([Request(run.prompts(1)[0], 0, (0, 1, 2, 3))])
    after, rewards = active.hooks.resample(rollouts=rollouts, rewards=run.score(rollouts), run=run)
    assert set(after.tag) == {TAG} and len(run.asked) == 2
    assert set(run.verdicts(after, rewards).tolist()) == {0.0} and len(set(rewards.total.tolist())) == 2


def test_a_greedy_baseline_answers_the_sub_questions_too():
    """ReMax on a routed group: greedy fails at once (R = 0), so the advantages are the prefix rewards."""
    config, active = compose("algo=[scope_rl,remax]", "prompts_per_step=1", "group_size=4", "plugins.scope_rl.stage=asr")  # fmt: skip
    run = Groups({0: "0000"}, slots="S1:{0};S2:no#{answer}")
    run.config, run.active, run.hooks, run.plugins = config, active, active.hooks, active.plugins
    text = run.text
    run.text = lambda request, sample: "S1:no#" + request.prompt.answer if request.tag == "remax" else text(request, sample)  # fmt: skip
    rollouts = run.generate([Request(run.prompts(1)[0], 0, (0, 1, 2, 3))])
    rollouts, rewards = active.hooks.resample(rollouts=rollouts, rewards=run.score(rollouts), run=run)
    assert active.hooks.advantage(rollouts=rollouts, rewards=rewards, run=run).tolist() == [0, 0.25, 0, 0.25]


# --- a data column, and whole runs --------------------------------------------------------------------------------------


def test_sub_questions_from_a_data_column_of_chats():
    made = plugin(**options("asr", column="hints"))
    prompt = Prompt("q", messages=({"role": "user", "content": "What is half of 6 times 7?"},), answer="21",
                    extra={"hints": '[["What is 6 times 7?", "42"]]'})  # fmt: skip

    class Chat(Context):
        def generate(self, requests, temperature=None):
            boxed = r"[SUB-1 ANSWER] \boxed{%s} so [MAIN ANSWER] \boxed{%s}"
            asked = [boxed % pair for pair in (("42", "21"), ("42", "20"), ("41", "21"), ("$42.$", "021"))]
            texts = asked if requests[0].tag == TAG else ["20"] * 4
            self.prompt = requests[0].prompt
            return replace(super().generate(requests), text=tuple(texts))

    run = Chat(*composition())
    rollouts = run.generate([Request(prompt, 0, (0, 1, 2, 3))])
    _, rewards = composition()[1].hooks.resample(rollouts=rollouts, rewards=run.score(rollouts), run=run)
    assert rewards.total.tolist() == [1, 0.5, 0, 1]
    content = run.prompt.messages[-1]["content"]
    assert content.startswith("What is half of 6 times 7?\n\n") and "1. What is 6 times 7?" in content
    assert "[SUB-i ANSWER]" in content and "[MAIN ANSWER]" in content and "42" not in content and "21" not in content
    assert last(made, "solved") == 1


def test_a_column_that_holds_something_else_is_refused():
    plugin(**options("asr", column="hints"))
    run = Context(*composition())
    prompt = Prompt("q", text="1=", answer="1", extra={"hints": ["a", 3]})
    rollouts = run.generate([Request(prompt, 0, (0, 1))])
    with pytest.raises(UserError, match="prompt 'q': 'hints' is no list of sub-questions"):
        composition()[1].hooks.resample(rollouts=rollouts, rewards=run.score(rollouts), run=run)


RUN = [  # the policy that ships: it is right in a third of the sums of three numbers, and never fills a slot
    "max_completion_length=28", "prompts_per_step=6", "group_size=4", "update.mini_batches=2", "lr=3e-4",
    "eval.prompts=4", "eval.samples=0", "eval.every=0", "logger.trackers=[]", "logger.progress=false",
    "logger.completions=-1", "plugins.scope_rl.tau=0.3",
]  # fmt: skip
PLAIN = RUN[:-1]


def rows(folder):
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def test_without_routing_the_first_stage_is_grpo_bit_for_bit(tmp_path):
    """Section 7, property 2: tau = 0, and prompts without sub-questions."""
    asr = ["algo=scope_rl", "plugins.scope_rl.stage=asr"]
    train(tmp_path / "grpo", "steps=1", small=PLAIN)
    train(tmp_path / "tau", *asr, "plugins.scope_rl.tau=0", "steps=1", small=PLAIN)
    train(tmp_path / "none", *asr, "plugins.scope_rl.column=hints", "steps=1", small=PLAIN)
    train(tmp_path / "routed", *asr, "steps=1", small=PLAIN)
    assert digest(tmp_path / "tau") == digest(tmp_path / "none") == digest(tmp_path / "grpo")
    assert digest(tmp_path / "routed") != digest(tmp_path / "grpo")


def test_a_run_goes_through_both_stages_and_resumes_bit_for_bit(tmp_path):
    overrides = ["algo=scope_rl", "plugins.scope_rl.switch=2"]
    train(tmp_path / "run", *overrides, "steps=4", small=RUN)
    lines = [line for line in metrics(tmp_path / "run") if "scope_rl/stage" in line]
    assert [line["scope_rl/stage"] for line in lines] == [1, 1, 2, 2]
    assert all(0 < line["scope_rl/routed"] < 1 and line["scope_rl/replaced"] > 0 for line in lines[:2])
    assert all("scope_rl/routed" not in line and line["rollout/rows"] == 24 for line in lines[2:])
    assert all(line["scope_rl/useful"] > 0.2 and line["scope_rl/eta_after"] > 0 for line in lines[2:])
    groups = {}
    for row in rows(tmp_path / "run"):
        routed = row["tag"] == TAG
        assert routed == row["prompt"].startswith("S1:") == row["prompt_id"].endswith("/scaffold")
        assert not (routed and row["step"] > 2)
        right = row["rewards"]["answer"]
        if row["step"] > 2:
            assert 0 <= row["total"] < 1 if right else row["total"] == 0
        groups.setdefault((row["step"], row["group_id"]), []).append(row["tag"])
    assert all(len(tags) == 4 and len(set(tags)) == 1 for tags in groups.values())
    train(tmp_path / "parts", *overrides, "steps=2", small=RUN)
    train(tmp_path / "parts", *overrides, "steps=4", f"resume={tmp_path / 'parts'}", small=RUN)
    assert digest(tmp_path / "parts") == digest(tmp_path / "run")
    assert metrics(tmp_path / "parts")[-1] == metrics(tmp_path / "run")[-1]


def test_a_run_on_a_data_column(tmp_path):
    """task=jsonl: evaluation sees no sub-questions, and nobody sees an answer before it is given."""
    task = Arithmetic(Arithmetic.Config(level=2, train=24, heldout=4))
    lines = [
        {"prompt": p.text, "answer": p.answer, "hints": [{"question": q, "answer": a} for q, a in scaffold(p)]}
        for p in task.train
    ]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = ["task=jsonl", f"task.path={tmp_path / 'my.jsonl'}", "reward=numeric", "plugins.numeric.marker='#'"]
    policy = f"model.path={ASSETS / 'tiny-arithmetic'}"
    overrides = [*data, policy, "algo=scope_rl", "plugins.scope_rl.stage=asr", "plugins.scope_rl.column=hints"]
    train(tmp_path / "run", *overrides, "steps=2", small=[*RUN, "eval.prompts=2"])
    first = [line for line in metrics(tmp_path / "run") if "scope_rl/stage" in line][0]
    assert 0 < first["scope_rl/routed"] < 1 and first["scope_rl/accuracy"] > 0
    answers = {line["prompt"]: {step["answer"] for step in line["hints"]} | {line["answer"]} for line in lines}
    routed = [row for row in rows(tmp_path / "run") if row["tag"] == TAG]
    for row in routed:
        question, shown = row["prompt"].rpartition(";")[2], re.findall(r"[0-9]+", row["prompt"])
        assert not answers[question] & set(shown) - set(re.findall(r"[0-9]+", question))


@pytest.mark.slow
def test_two_processes_make_the_update_of_one(tmp_path):
    """Routing, the second pass and the judge's work are divided, and every process has the whole of them."""
    command = [*RUN, "algo=scope_rl", "plugins.scope_rl.stage=mix", "plugins.scope_rl.tau=0.3", "steps=2"]
    weights, lines = [], []
    train(tmp_path / "one", *command, small=())
    processes.two([*command, f"run_dir={tmp_path / 'two'}"], tmp_path)
    for place in (tmp_path / "one", tmp_path / "two"):
        weights.append(load_file(place / "model" / "model.safetensors"))
        lines.append([{n: v for n, v in line.items() if n.startswith("scope_rl/")} for line in metrics(place)])
    # Adam divides by the size of a gradient, and so the rounding of a tiny one grows: two updates of lr 3e-4 each
    assert max(float((weights[0][key] - weights[1][key]).abs().max()) for key in weights[0]) < 1e-5
    for one, two in zip(*lines, strict=True):
        assert one == pytest.approx(two, abs=1e-4)
    assert all(line["scope_rl/routed"] > 0 and line["scope_rl/useful"] > 0 for line in lines[0] if line)
