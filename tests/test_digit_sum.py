"""The task with many right answers: its verifier, its worked answers, its prompts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo import UserError
from grpozoo.compose.task import load_task
from grpozoo.tasks.digit_sum import DigitSum
from grpozoo.types import Prompt


def task(**options):
    return DigitSum(DigitSum.Config(**options))


@pytest.mark.parametrize(
    "completion, right",
    [("953", 1), ("98", 1), ("89", 1), ("17", 0), ("0953", 0), ("9 53", 0), ("", 0), ("954", 0), ("१", 0), ("-953", 0)],
)
def test_an_answer_is_right_if_its_digits_are_allowed_and_add_up(completion, right):
    assert task().verify(Prompt("17/0", text="17=", answer="17"), completion) == right


@settings(max_examples=40, deadline=None)
@given(low=st.integers(1, 4), width=st.integers(1, 5), least=st.integers(0, 12), span=st.integers(0, 20))
def test_worked_answers_without_noise_are_right(low, width, least, span):
    try:
        made = task(
            low=low, high=min(low + width, 9), min_sum=low + least, max_sum=low + least + span, variants=2, wrong=0
        )
    except ValueError as error:
        assert "no digits" in str(error)
        return
    assert all(made.verify(prompt, made.solution(prompt)) == 1 for prompt in made.train)


def test_the_noise_is_the_share_that_was_asked_for_and_the_same_each_time():
    made = task(wrong=0.25)
    answers = [made.solution(prompt) for prompt in made.train]
    wrong = sum(made.verify(prompt, text) == 0 for prompt, text in zip(made.train, answers, strict=True)) / len(answers)
    assert wrong == pytest.approx(0.25, abs=0.03)  # 2080 draws: three standard deviations
    assert [made.solution(prompt) for prompt in made.train] == answers


def test_a_sum_has_many_different_worked_answers():
    made = task(wrong=0)
    answers = {made.solution(prompt) for prompt in made.train if prompt.answer == "20"}
    assert len(answers) > 60  # of 80 variants


def test_prompts_differ_in_their_ids_and_held_out_ones_are_asked_once_each():
    made = task()
    ids = [prompt.id for prompt in [*made.train, *made.heldout]]
    assert len(set(ids)) == len(ids)
    assert [prompt.text for prompt in made.heldout] == [f"{n}=" for n in range(5, 31)]


@pytest.mark.parametrize("options, message", [({"low": 0}, "low"), ({"high": 10}, "high"), ({"wrong": 1}, "wrong"), ({"low": 7, "high": 8, "min_sum": 9}, "no digits 7..8 add up to 9")])  # fmt: skip
def test_impossible_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        load_task({"kind": "digit_sum", **options})
