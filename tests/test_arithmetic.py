"""The arithmetic family: exact values, an exact verifier, a stable split."""

import random
import re
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo import UserError
from grpozoo.tasks.arithmetic import (
    ALPHABET,
    LEVELS,
    Arithmetic,
    calculate,
    check_step,
    final_answer,
    last_integer,
    parse_steps,
    scaffold,
)


def task(**options):
    return Arithmetic(Arithmetic.Config(**{"train": 64, "heldout": 8, **options}))


def worked(expression, **options):
    """The task's own prompt for one expression."""
    made = task(**options)
    operands = tuple(map(int, re.findall(r"\d+", expression)))
    return made, made._prompt(operands, "".join(re.findall(r"[-+*]", expression)))


def test_the_default_problem_is_a_chain_of_three_with_worked_steps():
    made, prompt = worked("12+35+48")
    assert prompt.text == "12+35+48="
    assert made.solution(prompt) == "12+35=47;47+48=95#95"
    assert (prompt.answer, prompt.extra["values"], scaffold(prompt)) == ("95", [47, 95], [("12+35", "47")])


def test_parentheses_are_worked_from_the_left_and_products_come_first_without():
    left, prompt = worked("7+5*3-4*2", digits=1, parentheses=True, operators="+-*", terms=5)
    assert prompt.text == "((7+5)*3-4)*2="
    assert left.solution(prompt) == "7+5=12;12*3=36;36-4=32;32*2=64#64"
    assert scaffold(prompt) == [("7+5", "12"), ("(7+5)*3", "36"), ("(7+5)*3-4", "32")]
    usual, prompt = worked("7+5*3-4*2", digits=1, operators="+-*", terms=5)
    assert usual.solution(prompt) == "5*3=15;4*2=8;7+15=22;22-8=14#14"
    assert scaffold(prompt) == [("5*3", "15"), ("4*2", "8"), ("7+5*3", "22")]


def test_a_modulus_applies_to_every_result():
    made, prompt = worked("60-66+29", modulus=97, operators="+-", terms=3)
    assert made.solution(prompt) == "60-66=91;91+29=23#23"  # -6 + 97 = 91, 120 - 97 = 23


@pytest.mark.parametrize("level", LEVELS)
def test_steps_sources_and_answers_agree_with_the_calculator(level):
    made = task(level=level, heldout=32)
    for prompt in [*made.train, *made.heldout]:
        modulus, steps = prompt.extra["modulus"], prompt.extra["steps"]
        assert calculate(prompt.extra["expression"], modulus) == int(prompt.answer) == steps[-1]["value"]
        assert steps[-1]["source"] == prompt.extra["expression"]
        for step in steps:
            assert check_step(step["lhs"], step["rhs"], modulus)
            assert calculate(step["source"], modulus) == step["value"]
        solution = made.solution(prompt)
        assert parse_steps(solution) == [(step["lhs"], step["rhs"]) for step in steps]
        assert made.verify(prompt, solution) == 1.0
        assert set(prompt.text + solution) <= set(ALPHABET)


def test_the_default_sets_are_made_in_an_instant_and_hold_no_problem_twice():
    def spent(work):
        start = time.process_time()
        work()
        return time.process_time() - start

    made = Arithmetic(Arithmetic.Config())
    needed = min(spent(lambda: Arithmetic(Arithmetic.Config())) for _ in range(5))
    yardstick = min(spent(lambda: sorted(f"{n * 7919 % 20512}x" for n in range(200_000))) for _ in range(5))
    assert needed < 2.5 * yardstick  # a quarter of a second where sorting these strings takes a fifth
    ids = [prompt.id for prompt in made.train] + [prompt.id for prompt in made.heldout]
    assert len(ids) == len(set(ids)) == 20512


def test_the_sides_are_the_same_in_every_configuration():
    """Also for problems in another order of operands: 12+35 in training would give 35+12 away."""

    def keys(prompts):
        return {tuple(sorted(re.findall(r"\d+", prompt.extra["expression"]))) for prompt in prompts}

    small, large, brackets = task(), task(train=20000, heldout=512), task(parentheses=True, train=4000, heldout=256)
    assert not keys(large.train) & (keys(large.heldout) | keys(small.heldout) | keys(brackets.heldout))
    assert [p.id for p in small.train] == [p.id for p in large.train[:64]]


def test_sets_and_fingerprint_are_the_same_in_another_process():
    made = "Arithmetic(Arithmetic.Config(level=3, train=50, heldout=5))"
    code = f"from grpozoo.tasks.arithmetic import Arithmetic; print({made}.fingerprint())"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONHASHSEED": "7"}, check=True
    )
    assert out.stdout.strip() == task(level=3, train=50, heldout=5).fingerprint()


def test_the_fingerprint_tells_problems_and_options_apart():
    prints = [task(**o).fingerprint() for o in ({}, {"level": 3}, {"modulus": 97}, {"chat": True}, {"train": 65})]
    assert len(set(prints)) == len(prints)


def test_a_family_that_is_too_small_says_how_many_problems_it_has():
    everything = Arithmetic(Arithmetic.Config(digits=1, terms=2))  # null sizes: all there are
    train, heldout = len(everything.train), len(everything.heldout)
    assert train + heldout == 81  # 9 * 9
    with pytest.raises(UserError, match=f"{train} distinct problems.*\nset task.train={train}"):
        task(digits=1, terms=2, train=train + 1)
    assert len(task(digits=1, terms=2, train=train, heldout=heldout).heldout) == heldout


@pytest.mark.parametrize(
    "completion, score",
    [
        ("12+35=47;47+48=95#95", 1.0),
        ("#95", 1.0),  # the steps do not count
        ("nonsense # 95 \n", 1.0),  # blanks around the answer do not matter
        ("12+35=47;47+48=95#96", 0.0),
        ("95", 0.0),  # no marker
        ("12+35=47;47+48=95#", 0.0),
        ("12+35=47;47+48=95#095", 0.0),
        ("12+35=47;47+48=95#+95", 0.0),
        ("12+35=47;47+48=95#95;", 0.0),  # anything after it
        ("#95#95", 0.0),
        ("#94#95", 0.0),
        ("#9 5", 0.0),
        ("#٩٥", 0.0),  # digits of another script
        ("", 0.0),
    ],
)
def test_verification_with_scratch_pad(completion, score):
    made, prompt = worked("12+35+48")
    assert made.verify(prompt, completion) == score


@pytest.mark.parametrize(
    "completion, score",
    [("95", 1.0), ("#95", 1.0), (" 95\n", 1.0), ("95.", 0.0), ("12+35=47;47+48=95#95", 0.0), ("##95", 0.0)],
)
def test_verification_without_scratch_pad(completion, score):
    made, prompt = worked("12+35+48", scratchpad=False)
    assert made.solution(prompt) == "95"
    assert made.verify(prompt, completion) == score


@pytest.mark.parametrize(
    "completion, score",
    [
        ("47", 1.0),
        ("The answer is **47**.", 1.0),
        ("12 + 35 = 47.00", 1.0),
        ("12+35=47", 1.0),
        ("### Answer\n47", 1.0),
        ("#47", 1.0),
        ("47 is 12 plus 35", 0.0),  # the last number counts
        ("-47", 0.0),
        ("47.5", 0.0),
        ("1,047", 0.0),
        ("47 #", 0.0),
        ("I do not know", 0.0),
    ],
)
def test_verification_in_chat(completion, score):
    made, prompt = worked("12+35", chat=True, terms=2)
    assert prompt.messages[0]["content"] == "What is 12 + 35? Answer with the number only."
    assert prompt.text is None
    assert made.verify(prompt, completion) == score


def test_chat_with_scratch_pad_and_modulus_is_told_in_words():
    made, prompt = worked("12+35+60", chat=True, scratchpad=True, modulus=97)
    assert "(12 + 35 + 60) mod 97" in prompt.messages[0]["content"]
    assert made.solution(prompt) == "12+35=47\n47+60=10\n#10"
    assert made.verify(prompt, made.solution(prompt)) == 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_a_corrupt_solution_has_one_slip_that_is_carried_on_to_a_wrong_answer(level):
    made = task(level=level, corrupt=1.0)
    for prompt in made.train:
        solution, modulus = made.solution(prompt), prompt.extra["modulus"]
        right = [check_step(lhs, rhs, modulus) for lhs, rhs in parse_steps(solution)]
        assert right.count(False) == 1
        assert parse_steps(solution)[-1][1] == final_answer(solution)
        assert made.verify(prompt, solution) == 0.0


def test_the_corrupt_share_is_kept_and_grows_without_changing_sides():
    third, half = task(corrupt=0.3, train=2000), task(corrupt=0.5, train=2000)
    wrong = {p.id for p in third.train if not third.verify(p, third.solution(p))}
    assert abs(len(wrong) / 2000 - 0.3) < 4 * (0.3 * 0.7 / 2000) ** 0.5  # four standard errors
    assert wrong < {p.id for p in half.train if not half.verify(p, half.solution(p))}
    assert [third.solution(p) for p in third.train[:50]] == [third.solution(p) for p in third.train[:50]]


@pytest.mark.parametrize("level", LEVELS)
def test_slips_come_at_every_step_alike_and_are_carried_on(level):
    """Of all steps a third slips, after a slip as often as after none; the lines go on from the values they state."""
    made, counts = (
        task(level=level, slips=1 / 3, train=1500),
        {True: [0, 0], False: [0, 0]},
    )  # slipped before: [n, slips]
    for prompt in made.train:
        solution, before = made.solution(prompt), False
        assert parse_steps(solution)[-1][1] == final_answer(solution) and "--" not in solution
        for lhs, rhs in parse_steps(solution):
            slipped = not check_step(lhs, rhs, prompt.extra["modulus"])
            counts[before] = [count + more for count, more in zip(counts[before], (1, slipped), strict=True)]
            before = before or slipped
    for n, slips in counts.values():
        assert n == 0 or abs(slips / n - 1 / 3) < 4.5 * (2 / 9 / n) ** 0.5
    assert made.fingerprint() != task(level=level, train=1500).fingerprint()


def test_parse_steps_keeps_the_place_of_what_is_no_step():
    assert parse_steps("1+2=3; ;oops;3+4=7=8;;3+4=7#7;9+9=18") == [
        ("1+2", "3"),
        ("oops", ""),
        ("3+4=7=8", ""),
        ("3+4", "7"),
    ]
    assert parse_steps("#1+2=3") == []


@pytest.mark.parametrize(
    "lhs, rhs", [("1+2", "4"), ("1+2", "03"), ("1+2", ""), ("oops", "3"), ("", "0"), ("1+2", "3.0")]
)
def test_a_wrong_or_malformed_step_is_wrong(lhs, rhs):
    assert check_step("1+2", "3")
    assert not check_step(lhs, rhs)


EXPRESSIONS = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]}){t[1]} -{t[2]}")
        | inner.map("({})".format)
    ),
    max_leaves=8,
)


@given(EXPRESSIONS.filter(lambda text: len(text) <= 256))
def test_the_calculator_agrees_with_python(text):
    plain = re.sub(r"\b0+(?=\d)", "", text)
    assert calculate(text) == eval(plain)  # noqa: S307 the reference; the text is made of digits, signs and brackets
    assert calculate(text, 97) == eval(plain) % 97  # noqa: S307


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1+",
        "(1",
        "1)",
        "1 2",
        "2**3",
        "1/2",
        "a",
        "__import__('os')",
        "1+²",
        "(" * 33 + "1" + ")" * 33,
        "9" * 257,
        "()",
    ],
)
def test_the_calculator_refuses_everything_else(text):
    with pytest.raises(ValueError):
        calculate(text)


@given(st.text(alphabet=ALPHABET + " \n,.ab", max_size=80))
@settings(max_examples=300)
def test_no_completion_makes_the_parsers_raise(text):
    for answer in (final_answer(text), last_integer(text)):
        assert answer is None or str(int(answer)) == answer
    for lhs, rhs in parse_steps(text):
        check_step(lhs, rhs)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"level": 7}, "level is one of 1, 2, 3, 4, 5, 6"),
        ({"operators": "+/"}, "operators"),
        ({"operators": "++"}, "operators"),
        ({"operators": ""}, "operators"),
        ({"terms": 1}, "terms"),
        ({"terms": 3, "min_terms": 4}, "min_terms"),
        ({"digits": 0}, "digits"),
        ({"modulus": 1}, "modulus"),
        ({"train": 0}, "train"),
        ({"corrupt": 1.5}, "corrupt"),
        ({"slips": -0.5}, "slips"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Arithmetic.Config(**options)


def test_explicit_options_win_over_the_level():
    made = task(level=4, digits=2, terms=4)
    lengths = {len(re.findall(r"\d+", p.text)) for p in made.train}
    assert lengths == {4}
    assert all(10 <= int(n) <= 99 for p in made.train for n in re.findall(r"\d+", p.text))
    assert {c for p in made.train for c in p.text} & set("*-")


def test_the_python_generator_is_not_touched():
    random.seed(3)
    expected = random.random()
    random.seed(3)
    made = task(corrupt=1.0)
    made.solution(made.train[0])
    assert random.random() == expected
