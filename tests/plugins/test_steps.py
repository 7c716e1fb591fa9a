"""reward=steps: which steps are right, where they end, and that a run learns from them with algo=process."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from grpozoo_plugins.steps import Steps
from reward_rows import rewards_of

from grpozoo import Prompt, Rollouts, UserError
from grpozoo.tasks.arithmetic import Arithmetic
from grpozoo.testing import check_plugin, compose, example
from grpozoo.testing.context import Context

STOP = 0
PIECES = ["", *"0123456789+-*=;#\n ab", "47", "=47;", "x"]  # token id -> text; some tokens span several characters
RIGHT = {"steps": [{"lhs": "12+35", "rhs": "47"}, {"lhs": "47+48", "rhs": "95"}]}


def decode(ids):
    return "".join(PIECES[token] for token in ids)


class Sums:
    """Right is what ends with #95."""

    verifies = True

    def verify(self, prompt, completion):
        return float(completion.endswith("#95")) if self.verifies else None


def spelled(text, *longer):
    """Token ids of a text, character by character but for the pieces in `longer`; the stop token at the end."""
    ids = []
    while text:
        piece = next((piece for piece in longer if text.startswith(piece)), text[0])
        ids.append(PIECES.index(piece))
        text = text[len(piece) :]
    return [*ids, STOP]


def rows(*tokens, extra=RIGHT, mask=None):
    width = max(map(len, tokens))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in tokens])
    mask = torch.arange(width) < torch.tensor([len(row) for row in tokens])[:, None] if mask is None else mask
    count = len(tokens)
    return Rollouts(
        prompts=tuple(Prompt("p", text="12+35+48=", answer="95", extra=extra) for _ in tokens),
        group_id=torch.zeros(count, dtype=torch.int64), sample_id=torch.arange(count), prompt_ids=((1,),) * count,
        completion_ids=ids, completion_mask=mask, logprobs=torch.zeros(mask.shape), finish_reason=("stop",) * count,
        text=tuple(map(decode, tokens)), tag=("train",) * count, policy=("policy",) * count,
    )  # fmt: skip


def judged(rollouts, task=None, **options):
    """The matrices as lists of (last token, reward)."""
    run = SimpleNamespace(task=task or Sums(), policy=SimpleNamespace(decode=decode))
    plugin = Steps(Steps.Config(**options))
    vectors = rewards_of({"steps": plugin}, rollouts, run).vectors["steps"]
    return [[tuple(line) for line in matrix.tolist()] for matrix in vectors]


@pytest.mark.parametrize(
    "text, expected",
    [
        # 12+35=47;47+48=95#95 and the stop token: ends at `;` (8), at the 5 before `#` (16), at the stop token (20)
        ("12+35=47;47+48=95#95", [(8, 1), (16, 1), (20, 1)]),
        ("12+35=47;47+48=94#94", [(8, 1), (16, 0), (20, 0)]),
        ("12+35=47;47+48=95#94", [(8, 1), (16, 1), (20, 0)]),
        ("47+48=95;12+35=47#95", [(8, 1), (16, 1), (20, 1)]),  # the other way round
        ("12+35=47\n47+48=95\n#95", [(8, 1), (17, 1), (21, 1)]),  # in lines
        ("12 + 35 = 47;;#95", [(12, 1), (17, 1)]),  # blanks do not matter, an empty step is none
        ("12+35=47;12+35=47#95", [(8, 1), (16, 0), (20, 1)]),  # a right step counts once
        ("ab;#95", [(2, 0), (6, 1)]),
        ("#95", [(3, 1)]),
        ("12+35=47;47+4", [(8, 1), (12, 0), (13, 0)]),  # no answer: wrong, at the end
        ("", [(0, 0)]),
    ],
)
def test_steps_of_a_completion(text, expected):
    assert judged(rows(spelled(text))) == [expected]


def test_a_step_ends_with_the_token_that_completes_it():
    """12+35 =47; 47 +48=95#95: the first step is complete with the sixth token, the second with the thirteenth."""
    tokens = spelled("12+35=47;47+48=95#95", "=47;", "47")
    assert [PIECES[token] for token in tokens[5:7]] == ["=47;", "47"]
    assert judged(rows(tokens)) == [[(5, 1), (12, 1), (16, 1)]]


def test_a_truncated_completion_ends_where_it_was_cut():
    assert judged(rows(spelled("12+35=47;47")[:-1])) == [[(8, 1), (10, 0), (10, 0)]]


def test_places_count_columns_also_where_the_mask_has_holes():
    """`#95` and the stop token in columns 1, 2, 4, 5."""
    ids = [PIECES.index("a"), *spelled("#9")[:2], PIECES.index("b"), *spelled("5")]
    mask = torch.tensor([[False, True, True, False, True, True]])
    rollouts = replace(rows(ids, mask=mask), text=("#95",))
    assert judged(rollouts) == [[(5, 1)]]


def test_separator_and_marker_are_options():
    text = "12+35=47*47+48=95x95"
    found = judged(rows(spelled(text)), separator=r"\*", marker="x")
    assert found == [[(8, 1), (16, 1), (20, 0)]]  # Sums wants #95
    assert judged(rows(spelled("12+35=47;#95")), marker=None) == [[(8, 1), (11, 0), (12, 1)]]


def test_a_task_without_verifier_has_no_step_for_the_answer():
    task = Sums()
    task.verifies = False
    found = judged(rows(spelled("12+35=47;47+48=95#95")), task)
    assert found == [[(8, 1), (20, 1)]]  # the stop token belongs to the last step


def test_right_steps_may_be_plain_texts():
    assert judged(rows(spelled("12+35=47;ab"), extra={"steps": ["12 + 35 = 47", "a b"]})) == [
        [(8, 1), (10, 1), (11, 0)]
    ]


def test_a_prompt_without_steps_has_an_empty_matrix_and_a_task_without_is_an_error():
    with_steps, without = rows(spelled("12+35=47;#95")), rows(spelled("#95"), extra={})
    mixed = replace(rows(spelled("12+35=47;#95"), spelled("#95")), prompts=(*with_steps.prompts, *without.prompts))
    assert judged(mixed) == [[(8, 1), (12, 1)], []]
    with pytest.raises(UserError, match=r"prompts of Sums have no extra\['steps'\]"):
        judged(without)
    known = Steps(Steps.Config())
    known.load_state_dict({"found": True})  # an epoch may have batches without
    run = SimpleNamespace(task=Sums(), policy=SimpleNamespace(decode=decode))
    (matrix,) = rewards_of({"steps": known}, without, run).vectors["steps"]
    assert matrix.numel() == 0 and known.state_dict() == {"found": True}


def test_a_vector_has_no_part_in_the_total():
    rollouts, run = rows(spelled("12+35=47;#95")), SimpleNamespace(task=Sums(), policy=SimpleNamespace(decode=decode))
    rewards = rewards_of({"steps": Steps(Steps.Config())}, rollouts, run)
    total = compose()[1].hooks.transform_rewards(rollouts=rollouts, rewards=rewards, run=run).total
    assert not rewards.components and math.isnan(float(total))


def test_it_logs_the_share_of_right_steps():
    """1 of 2 in the first row, 1 of 1 in the second: the means of rows, weighted by their steps, are 2 of 3."""
    run = SimpleNamespace(task=Sums(), policy=SimpleNamespace(decode=decode))
    plugin = Steps(Steps.Config())
    rewards_of({"steps": plugin}, rows(spelled("12+35=47;ab#95"), spelled("12+35=47;#9")), run)
    assert plugin.logged == [("steps/right", 0.5, 2.0), ("steps/right", 1.0, 1.0)]


@pytest.mark.parametrize("options", [{"level": 2}, {"level": 3}, {"level": 4}, {"level": 5}, {"level": 2, "chat": True, "scratchpad": True}])  # fmt: skip
def test_worked_solutions_of_the_arithmetic_task_are_right_in_every_step(options):
    task = Arithmetic(Arithmetic.Config(train=8, heldout=1, **options))
    for prompt in task.train:
        text = task.solution(prompt)
        rollouts = replace(rows(spelled(text)), prompts=(prompt,))
        (found,) = judged(rollouts, task)
        assert [r for _, r in found] == [1.0] * (len(prompt.extra["steps"]) + 1)
        work = text.partition("#")[0]
        ends = [place for place, sign in enumerate(work) if sign in ";\n" or place == len(work) - 1]
        assert [int(end) for end, _ in found] == [*ends, len(text)]


def test_with_process_the_step_that_went_wrong_carries_the_blame():
    """Through the run's own hooks. Rewards 1 1 1 | 1 0 0: mean 2/3, std sqrt(4/15), z = .6453723 and -1.2907446."""
    config, active = compose("algo=process", "reward=[answer,steps]", "task.level=2")
    run = Context(config, active)
    run.task, run.policies["policy"].decode = Sums(), decode
    rollouts = rows(spelled("12+35=47;47+48=95#95"), spelled("12+35=47;47+48=94#94"))
    rewards = run.score(rollouts)
    assert rewards.total.tolist() == [1.0, 0.0]
    A = active.hooks.advantage(rollouts=rollouts, rewards=rewards, run=run)
    good, bad = 0.6453723, -1.2907446
    assert A[0, [0, 8, 9, 16, 17, 20]].tolist() == pytest.approx([3 * good] * 2 + [2 * good] * 2 + [good] * 2, abs=1e-6)
    assert A[1, [0, 8, 9, 16, 17, 20]].tolist() == pytest.approx(
        [good + 2 * bad] * 2 + [2 * bad] * 2 + [bad] * 2, abs=1e-6
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"separator": "(a"}, r"separator '\(a' is not a regular expression"),
        ({"separator": ";*"}, "at least one character"),
        ({"marker": ""}, "at least one character"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Steps.Config(**options)


def test_conformance():
    """On the ragged example, its tokens decoded as decimal numbers, with steps in every second prompt."""
    step = example()
    prompts = tuple(
        replace(prompt, extra={"steps": ["4681012"]} if row % 2 else {})
        for row, prompt in enumerate(step.rollouts.prompts)
    )
    step = step._replace(rollouts=replace(step.rollouts, prompts=prompts))
    assert "reward" in check_plugin("steps", "reward=[answer,steps]", step=step)
