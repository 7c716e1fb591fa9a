"""The task with conflicting components: its answers, its scores, its prompts, its worked answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpozoo import UserError
from grpozoo.compose.task import load_task
from grpozoo.rewards.answers import ask
from grpozoo.tasks.digit_picks import CHOICES, GOOD, DigitPicks, answers, components, mean
from grpozoo.types import Prompt


def task(**options):
    return DigitPicks(DigitPicks.Config(**{"train": 40, "heldout": 20, **options}))


def prompt(m=1, digits="314159", collinear=False):
    return Prompt(digits, text=f"{digits}/{m}=", extra={"digits": digits, "answers": m, "collinear": collinear})


@pytest.mark.parametrize(
    "m, completion, expected",
    [
        (1, "135", [(0, 2, 4)]),
        (1, "531", [(0, 2, 4)]),
        (1, "113", []),  # a position twice
        (1, "137", []),  # there are six
        (1, "13", []),
        (1, "1350", []),
        (1, " 135", []),
        (1, "१35", []),
        (1, "<1>135", []),
        (3, "<1>135<2>246<3>456", [(0, 2, 4), (1, 3, 5), (3, 4, 5)]),
        (3, "<1>135<2>135", [(0, 2, 4), (0, 2, 4)]),  # repeats stay
        (3, "<1>13<2>246<3>45", [(1, 3, 5)]),
        (3, "<3>456<1>135", [(0, 2, 4), (3, 4, 5)]),
        (3, "<1>135<1>246", [(0, 2, 4)]),  # the first of a number
        (3, "<1>13<1>246", []),
        (3, "<1>135<4>246", [(0, 2, 4)]),  # three were asked for
        (3, "135", []),
        (3, "", []),
    ],
)
def test_what_is_an_answer(m, completion, expected):
    assert answers(prompt(m), completion) == expected


def test_the_components_by_hand():
    """3 1 4 1 5 9: positions 1 3 5 are 3 4 5, two odd and one even, sum 12; 1 1 9 are left, the small ones sum to 2."""
    assert components("314159", (0, 2, 4)) == pytest.approx([2 / 3, 1 / 3, 12 / 27, 2 / 27])
    assert mean("314159", (0, 2, 4)) == pytest.approx((1 + 14 / 27) / 4)
    assert components("314159", (0, 2, 4), collinear=True) == pytest.approx([(1 + 14 / 27) / 4] * 4)
    assert components("444455", (0, 1, 2))[3] == pytest.approx(4 / 27)  # 4 is small, 5 is not


@given(st.text("0123456789", min_size=6, max_size=6), st.sampled_from(CHOICES))
def test_components_lie_in_the_unit_interval_and_odd_excludes_even(digits, picks):
    values = components(digits, picks)
    assert all(0 <= value <= 1 for value in values) and values[0] + values[1] == pytest.approx(1)


@given(st.text("0123456789", min_size=6, max_size=6))
def test_at_most_half_of_the_choices_are_right_and_they_are_the_best(digits):
    made, asked = task(train=1, heldout=1), prompt(digits=digits)
    texts = ["".join(str(i + 1) for i in picks) for picks in CHOICES]
    right = [mean(digits, picks) for picks, text in zip(CHOICES, texts, strict=True) if made.verify(asked, text)]
    wrong = [mean(digits, picks) for picks, text in zip(CHOICES, texts, strict=True) if not made.verify(asked, text)]
    assert len(right) <= GOOD and (not right or min(right) > max(wrong))


def test_a_completion_is_right_if_all_answers_are_there_and_one_is_good():
    """314159: positions 1 5 6 are the three largest digits; 2 3 4 the smallest."""
    made = task()
    assert made.verify(prompt(), "156") == 1 and made.verify(prompt(), "234") == 0 and made.verify(prompt(), "15") == 0
    assert made.verify(prompt(3), "<1>234<2>234<3>156") == 1
    assert made.verify(prompt(3), "<1>234<2>234<3>243") == 0
    assert made.verify(prompt(3), "<1>156<2>156") == 0


@pytest.mark.parametrize("m", [1, 2, 3, 9])
def test_worked_answers_are_well_formed_and_random(m):
    made = task(answers=m, train=400)
    found = [answers(p, made.solution(p)) for p in made.train]
    assert all(len(picks) == m for picks in found)
    assert {picks for row in found for picks in row} == set(CHOICES)
    assert [made.solution(p) for p in made.train[:9]] == [made.solution(p) for p in made.train[:9]]


def test_the_skilled_share_of_worked_answers_is_the_best_in_a_component():
    """With all of them skilled every component leads in about a fifth or more; the form and the prompts stay."""
    made, plain = task(answers=3, train=200, skilled=1.0), task(answers=3, train=200)
    assert made.train[0] == plain.train[0] and made.fingerprint() != plain.fingerprint()
    leads = [0, 0, 0, 0]
    for p in made.train:
        digits = p.extra["digits"]
        top = [max(components(digits, picks)[c] for picks in CHOICES) for c in range(4)]
        for picks in answers(p, made.solution(p)):
            led = [components(digits, picks)[c] == top[c] for c in range(4)]
            assert any(led)
            leads = [count + lead for count, lead in zip(leads, led, strict=True)]
    assert min(leads) > 0.2 * 600
    half = task(answers=3, train=200, skilled=0.5)
    same = sum(half.solution(p) == plain.solution(p) for p in plain.train)
    assert 200 / 8 * 0.3 < same < 200 / 8 * 3


def test_prompts_are_apart_and_ask_for_the_number_of_answers():
    made, other = task(), task(answers=3)
    assert len({p.id for p in [*made.train, *made.heldout]}) == 60
    assert made.train[0].text == made.train[0].extra["digits"] + "/1="
    assert ask(made.train[0], 3) == other.train[0]  # the form that a warm start with answers=3 has learnt
    assert ask(other.train[0], 1) == made.train[0]
    assert made.fingerprint() != other.fingerprint()


@pytest.mark.parametrize(
    "options", [{"answers": 0}, {"answers": 10}, {"train": 0}, {"heldout": 0}, {"train": 10**6}, {"skilled": 1.5}]
)
def test_impossible_options_are_refused(options):
    with pytest.raises(UserError, match=next(iter(options))):
        load_task({"kind": "digit_picks", **options})
