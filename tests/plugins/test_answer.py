"""reward=answer: the task's verdict, word for word."""

from types import SimpleNamespace

import pytest
from grpozoo_plugins.answer import Answer
from reward_rows import column, rewards_of, rows

from grpozoo import UserError
from grpozoo.tasks import Task


class Copy(Task):
    """Half a point for the right length; no verdict on what has no answer."""

    def __init__(self):
        super().__init__(self.Config())

    def verify(self, prompt, completion):
        if prompt.answer is None:
            return None
        return 1.0 if completion == prompt.answer else 0.5 * (len(completion) == len(prompt.answer))


RUN = SimpleNamespace(task=Copy())


def test_each_row_gets_the_tasks_verdict_on_its_own_prompt():
    assert column(Answer(Answer.Config()), "answer", rows(["ab", "ba", "b"], ["ab", "ab", "ab"]), RUN) == [
        1.0,
        0.5,
        0.0,
    ]


def test_the_text_is_not_stripped():
    assert column(Answer(Answer.Config()), "answer", rows([" ab", "ab"], ["ab", "ab"]), RUN) == [0.0, 1.0]


def test_a_prompt_without_verdict_is_missing_and_not_zero():
    assert column(Answer(Answer.Config()), "answer", rows(["a", "a"], ["a", None]), RUN) == [1.0, None]


def test_a_task_without_verifier_is_an_error_that_names_other_rewards():
    with pytest.raises(
        UserError,
        match=r"plugins\.answer: the task Task has no verifier\n.*reward=numeric.*\n.*plugins\.function\.path=",
    ):
        column(Answer(Answer.Config()), "answer", rows(["a"], ["a"]), SimpleNamespace(task=Task(Task.Config())))


def test_prompts_without_an_answer_are_named_and_not_the_verifier():
    with pytest.raises(
        UserError, match=r"the task Copy gives no verdict: no prompt so far has an answer, the first is "
    ):
        column(Answer(Answer.Config()), "answer", rows(["a"], [None]), RUN)


def test_a_batch_without_verdict_is_no_error_once_there_was_one():
    plugin = Answer(Answer.Config())
    assert column(plugin, "answer", rows(["a"], ["a"]), RUN) == [1.0]
    assert column(plugin, "answer", rows(["a"], [None]), RUN) == [None]
    resumed = Answer(Answer.Config())
    resumed.load_state_dict(plugin.state_dict())
    assert column(resumed, "answer", rows(["a"], [None]), RUN) == [None]


def test_an_error_in_the_verifier_is_no_zero():
    def verify(prompt, text):
        return 1 / 0

    with pytest.raises(UserError, match=r"plugins\.answer: reward\(\) raised ZeroDivisionError"):
        rewards_of(
            {"answer": Answer(Answer.Config())},
            rows(["a"], ["a"]),
            SimpleNamespace(task=SimpleNamespace(verify=verify)),
        )
