"""Prompts with sub-questions: reading answers back, data columns, and the arithmetic task's options for a warm start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpozoo import Prompt, UserError
from grpozoo.rewards.judge import LABELS, RuleJudge
from grpozoo.tasks.arithmetic import Arithmetic, scaffold
from grpozoo.tasks.scaffold import asks, correct_steps, main_answer, normalised, read_chain, same, scaffolded

TEXT = Prompt("t", text="7+5*3=", answer="22")
CHAT = Prompt("c", messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "7+5*3?"}), answer="22")  # fmt: skip
CHAIN = [("5*3", "15"), ("half of 3", "3/2")]


def test_a_plain_prompt_keeps_its_end():
    made = scaffolded(TEXT, CHAIN)
    assert (made.id, made.text, made.answer) == ("t/scaffold", "S1:5*3;S2:half of 3;7+5*3=", "22")
    assert made.extra["slots"] == 2 and TEXT.text == "7+5*3=" and asks(made) and not asks(TEXT)


def test_a_chat_asks_in_its_last_message():
    made = scaffolded(CHAT, CHAIN)
    assert made.messages[0] == CHAT.messages[0] and len(made.messages) == 2
    content = made.messages[1]["content"]
    assert content.startswith("7+5*3?\n\n") and "1. 5*3\n2. half of 3\n" in content and "15" not in content


@pytest.mark.parametrize(
    "completion, right",
    [
        ("S1:15;S2:3/2#22", [1, 1]),
        ("5*3=15;S1:5*3=15;S2: 3/2 #22", [1, 1]),
        ("S1:15S2:3/2", [1, 1]),
        ("S1:15\nS2:3/2\n", [1, 1]),
        ("S2:3/2;S1:15", [1, 1]),
        ("S1:16;S2:3/2;S1:15", [1, 1]),
        ("S1:15;S1:;S2:3/2", [0, 1]),
        ("S1:15 or 16;S2:3/2", [0, 1]),
        ("S11:15;S2:3/2", [0, 1]),
        ("S1:#15", [0, 0]),
        ("", [0, 0]),
    ],
)
def test_slots(completion, right):
    assert correct_steps(TEXT, CHAIN, completion) == right
    assert main_answer(TEXT, completion) is None


@pytest.mark.parametrize(
    "completion, right, main",
    [
        (r"[SUB-1 ANSWER] \boxed{15} [SUB-2 ANSWER] \boxed{3/2} [MAIN ANSWER] \boxed{22}", [1, 1], "22"),
        (
            r"[SUB-1 ANSWER]: it is \boxed{15}, not \boxed{16}. [MAIN ANSWER] \boxed{\frac{1}{2}}",
            [1, 0],
            r"\frac{1}{2}",
        ),
        (r"[SUB-1 ANSWER] [SUB-2 ANSWER] \boxed{15}", [0, 0], "15"),  # the box belongs to the second
        (r"[SUB-1 ANSWER] \boxed{16} [SUB-1 ANSWER] \boxed{15} \boxed{9}", [1, 0], "9"),
        (r"[SUB-1 ANSWER] \boxed{15} [SUB-1 ANSWER] 15", [0, 0], "15"),
        (r"[SUB-2 ANSWER] \boxed{3/2} [MAIN ANSWER] 22", [0, 1], "3/2"),
        (r"[SUB-1 ANSWER] \boxed{15", [0, 0], None),
        ("22", [0, 0], None),
        ("\\boxed{22}" + " " * 1000, [0, 0], None),  # the last box of the final 1000 characters
    ],
)
def test_boxes(completion, right, main):
    assert correct_steps(CHAT, CHAIN, completion) == right
    assert main_answer(CHAT, completion) == main


@pytest.mark.parametrize(
    "one, other",
    [("47", " 47 "), ("047", "47"), ("+47", "47"), ("$47$", "47."), ("1,234,567", "1234567"), (r"\text{Even}", "even"),
     (r"\left( 1, 2 \right)", "(1,2)"), ("-0", "0"), ("3/2", "3 / 2")],
)  # fmt: skip
def test_answers_that_are_the_same(one, other):
    assert same(one, other)


@pytest.mark.parametrize("one, other", [("47", "48"), ("", ""), ("4.7", "47"), ("1,23", "123"), ("-5", "5"), ("a", "")])
def test_answers_that_differ(one, other):
    assert not same(one, other)


@given(st.text(max_size=30))
def test_normalisation_is_stable(text):
    assert normalised(normalised(text)) == normalised(text) or "\\" in text or "{" in text or "." in text


@given(st.text(alphabet="S12:;=[]SUB-MAINANSWER \\boxed{}#\n", max_size=80))
def test_no_completion_makes_the_readers_raise(text):
    for prompt in (TEXT, CHAT):
        assert len(correct_steps(prompt, CHAIN, text)) == 2
        main_answer(prompt, text)


@pytest.mark.parametrize(
    "found",
    [
        [("5*3", "15"), ("half of 3", "3/2")],
        [["5*3", 15], ["half of 3", "3/2"]],
        [{"question": "5*3", "answer": 15}, {"question": "half of 3", "answer": "3/2"}],
        '[["5*3", 15], ["half of 3", "3/2"]]',
    ],
)
def test_chains_from_a_column(found):
    assert read_chain(Prompt("p", text="x", extra={"hints": found}), "hints") == CHAIN


@pytest.mark.parametrize("found", [None, "", " ", [], "[]"])
def test_no_chain(found):
    assert read_chain(Prompt("p", text="x", extra={"hints": found}), "hints") == []
    assert read_chain(Prompt("p", text="x"), "hints") == []


@pytest.mark.parametrize("found", ["nonsense", 3, ["a"], [["a"]], [{"question": "a"}], [1]])
def test_a_chain_that_is_none_is_refused(found):
    with pytest.raises(UserError, match="'p': 'hints' is no list of sub-questions"):
        read_chain(Prompt("p", text="x", extra={"hints": found}), "hints")


def task(**options):
    return Arithmetic(Arithmetic.Config(**{"level": 4, "train": 600, "heldout": 8, **options}))


def test_a_share_of_the_training_prompts_asks_for_the_results_of_the_steps():
    plain, made = task(min_terms=3), task(min_terms=3, scaffold_share=0.5)
    asks = 0
    for before, prompt in zip(plain.train, made.train, strict=True):
        if prompt.id == before.id:
            assert (prompt.text, made.solution(prompt)) == (before.text, plain.solution(before))
            continue
        asks += 1
        assert prompt == scaffolded(before, scaffold(before))
        solution = made.solution(prompt)
        assert made.verify(prompt, solution) == 1 and all(correct_steps(prompt, scaffold(prompt), solution))
        without = solution
        for number in range(1, prompt.extra["slots"] + 1):
            without = without.replace(f"S{number}:", "", 1)
        assert without == plain.solution(before)
    assert abs(asks - 300) < 4 * (600 * 0.25) ** 0.5
    assert [p.id for p in made.heldout] == [p.id for p in plain.heldout]
    assert not any("slots" in p.extra for p in made.heldout)


def test_two_operands_have_no_sub_question():
    assert not any("slots" in p.extra for p in task(terms=2, scaffold_share=1.0, train=50).train)


def test_padded_solutions_are_right_and_the_same_each_time():
    made = task(modulus=10, terms=6, padding=0.4, scaffold_share=0.5)
    lines = useful = 0
    for prompt in made.train:
        solution = made.solution(prompt)
        assert solution == made.solution(prompt) and made.verify(prompt, solution) == 1
        if "slots" in prompt.extra:
            assert all(correct_steps(prompt, scaffold(prompt), solution))
            continue
        labels = RuleJudge().label(prompt, solution)
        assert LABELS[4] not in labels
        lines, useful = lines + len(labels), useful + labels.count("useful")
    assert abs(useful / lines - 0.6) < 0.05  # about 2500 lines in clusters


def test_the_default_keeps_its_fingerprint():
    assert Arithmetic(Arithmetic.Config()).fingerprint() == "832ea5a98c813329f5f2b22e3091bea2"  # of the first release
    prints = {task(train=64, **o).fingerprint() for o in ({}, {"padding": 0.1}, {"scaffold_share": 0.1})}
    assert len(prints) == 3


@pytest.mark.parametrize(
    "options, message",
    [({"padding": 1.0}, r"padding lies in \[0, 1\)"), ({"scaffold_share": 1.1}, "scaffold_share lies"),
     ({"padding": 0.1, "chat": True}, "plain prompts"), ({"scaffold_share": 0.1, "scratchpad": False}, "plain prompts")],
)  # fmt: skip
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Arithmetic.Config(**options)
