"""What a reward plugin may return, and what becomes of everything else."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pluggy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_rows import rewards_of, rows

from grpozoo import Plugin, UserError, group_mean, hookimpl, hooks
from grpozoo.ops import weighted_total
from grpozoo.rewards.score import score
from grpozoo.run.ask import Ask
from grpozoo.run.passes import Passes
from grpozoo.run.processes import Processes
from grpozoo.run.run import Run
from grpozoo.testing import Context, compose

NAN = float("nan")


class Returns(Plugin):
    """Answers with what it was made from; a callable is called in the hook."""

    @dataclass
    class Config:
        weight: float = 1.0

    def __init__(self, answer, weight=1.0):
        super().__init__(self.Config(weight))
        self.answer = answer

    @hookimpl
    def reward(self, rollouts):
        return self.answer() if callable(self.answer) else self.answer


def one(values, count=2):
    """The component of one plugin that answers {"x": values} for `count` rows."""
    return rewards_of({"mine": Returns({"x": values})}, rows(["a"] * count)).components["x"]


@pytest.mark.parametrize("value, expected", [
    (None, NAN), (NAN, NAN), (True, 1.0), (False, 0.0), (3, 3.0), (-0.25, -0.25),
    (Fraction(1, 4), 0.25), (Decimal("0.5"), 0.5),
    (torch.tensor(2.5), 2.5), (torch.tensor(True), 1.0), (torch.tensor(7), 7.0),
    (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
    (torch.tensor(0.5, requires_grad=True), 0.5), (np.float32(0.5), 0.5), (np.bool_(True), 1.0), (np.array(4), 4.0),
])  # fmt: skip
def test_a_row_may_answer_with_any_number_or_none(value, expected):
    answer = one([value, 1.0])
    assert answer.dtype == torch.float64 and not answer.requires_grad
    torch.testing.assert_close(
        answer, torch.tensor([expected, 1.0], dtype=torch.float64), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("values", [
    (1, 0), np.array([1, 0]), np.array([True, False]), torch.tensor([1.0, 0.0]), torch.tensor([1, 0]),
    torch.tensor([True, False]), iter([1, 0]),
])  # fmt: skip
def test_a_component_may_be_any_sequence(values):
    assert one(values).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), np.float64("inf"), torch.tensor(float("inf")), 10**400])
def test_infinity_names_plugin_component_and_prompt(value):
    with pytest.raises(UserError, match=r"plugins\.mine: reward 'x' is infinite for row 1, prompt 'p1'"):
        one([0.0, value])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_wrong_length_names_both_numbers(count):
    with pytest.raises(UserError, match=rf"plugins\.mine: reward 'x' has {count} values for 2 completions"):
        one([1.0] * count)


@pytest.mark.parametrize("value", ["1", 1j, {"x": 1}, object()])
def test_what_is_no_number_names_type_and_prompt(value):
    with pytest.raises(UserError, match=rf"reward 'x' is .*{type(value).__name__}.* for row 1, prompt 'p1'"):
        one([0.0, value])


@pytest.mark.parametrize("values", [1.0, "11", {"p0": 1}, torch.tensor(1.0)])
def test_a_component_that_is_no_list_is_refused(values):
    with pytest.raises(UserError, match=r"plugins\.mine: reward 'x' is one number per completion \(2 of them\)"):
        one(values)


def test_an_answer_that_is_no_dict_is_refused():
    with pytest.raises(UserError, match=r"plugins\.mine: reward\(\) returns \{name: .*got list"):
        rewards_of({"mine": Returns([1.0])}, rows(["a"]))


def fail():
    return {"x": [{}["nothing"]]}


async def fail_later():
    await asyncio.sleep(0)
    return fail()


@pytest.mark.parametrize("answer", [fail, fail_later])
def test_an_exception_names_plugin_error_and_place_and_is_never_a_zero(answer):
    with pytest.raises(
        UserError, match=r"plugins\.mine: reward\(\) raised KeyError\('nothing'\)\nat .*test_score\.py:\d+"
    ):
        rewards_of({"mine": Returns(answer)}, rows(["a"]))


def test_the_cause_of_a_failure_stays_attached():
    with pytest.raises(UserError) as error:
        rewards_of({"mine": Returns(fail)}, rows(["a"]))
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.parametrize("name", ["generate", "score", "measure", "gather", "sum", "prompts", "sum_gradients"])
@pytest.mark.parametrize("later", [False, True])
def test_what_waits_for_other_processes_is_refused_in_a_reward_on_one_process_too(name, later):
    """Asked in the main process alone it would wait for ever. A run kept from setup() is refused like the argument."""
    run = Context(*compose())

    def answer():
        with ThreadPoolExecutor(1) as pool:  # whoever calls it, a worker of the plugin's own too
            return pool.submit(getattr(run, name), []).result()

    async def answer_later():
        return answer()

    message = (
        rf"plugins\.mine: run\.{name}\(\) was called inside reward\(\)(.|\n)*transform_rewards\(\) or resample\(\)"
    )
    with pytest.raises(UserError, match=message):
        rewards_of({"mine": Returns(answer_later if later else answer)}, rows(["a"]), run)
    assert run.gather([1]) == [1]  # afterwards it is allowed again


def test_the_run_itself_marks_what_every_process_must_call():
    parts = (Run, Ask, Passes, Processes)
    marked = {name for part in parts for name, method in vars(part).items() if getattr(method, "collective", False)}
    assert {
        "generate",
        "score",
        "measure",
        "gather",
        "sum",
        "prompts",
        "sum_gradients",
        "evaluate",
        "current",
    } <= marked


def test_coroutines_that_change_their_input_are_told():
    rollouts = rows(["a", "b"])

    async def answer():
        await asyncio.sleep(0)
        rollouts.completion_ids.add_(1)
        return {"x": [1.0, 0.0]}

    with pytest.raises(UserError, match=r"plugins\.mine: reward\(\) changed rollouts\.completion_ids in place"):
        rewards_of({"mine": Returns(answer)}, rollouts)


def test_a_users_error_passes_unchanged():
    def answer():
        raise UserError("say it once")

    with pytest.raises(UserError, match="^say it once$"):
        rewards_of({"mine": Returns(answer)}, rows(["a"]))


def test_an_exit_in_a_reward_does_not_end_the_run_in_silence():
    with pytest.raises(UserError, match=r"raised SystemExit"):
        rewards_of({"mine": Returns(lambda: exit())}, rows(["a"]))


async def sleep_for_ever():
    await asyncio.sleep(600)


async def block_the_loop():
    time.sleep(3)  # a mistake that users make


@pytest.mark.parametrize("hang", [lambda: time.sleep(3), sleep_for_ever, block_the_loop])
def test_a_hanging_reward_ends_in_time_and_the_next_call_works(hang):
    start = time.monotonic()
    with pytest.raises(UserError, match=r"plugins\.slow: reward\(\) did not answer within 0\.2 s"):
        rewards_of({"slow": Returns(hang)}, rows(["a"]), timeout=0.2)
    assert time.monotonic() - start < 1.5

    async def prompt_answer():
        return {"x": [1.0]}

    assert rewards_of({"mine": Returns(prompt_answer)}, rows(["a"]), timeout=1).components["x"].tolist() == [1.0]


def test_coroutines_wait_for_each_other_in_one_loop_that_stays():
    """Two that meet at a barrier can only finish together; open connections survive a step only in the same loop."""
    loops = []

    def pair():
        barrier = asyncio.Barrier(2)

        async def answer(name):
            loops.append(asyncio.get_running_loop())
            await barrier.wait()
            return {name: [1.0]}

        return {"one": Returns(lambda: answer("a")), "two": Returns(lambda: answer("b"))}

    for _ in range(2):
        assert list(rewards_of(pair(), rows(["a"]), timeout=5).components) == ["a", "b"]
    assert len(loops) == 4 and len(set(map(id, loops))) == 1


def test_scoring_works_inside_a_running_event_loop():
    async def answer():
        return {"x": [2.0]}

    async def notebook():
        return rewards_of({"mine": Returns(answer)}, rows(["a"]))

    assert asyncio.run(notebook()).components["x"].tolist() == [2.0]


def test_rewards_record_no_gradient_and_leave_the_callers_mode_alone():
    weight = torch.ones(1, requires_grad=True)

    def answer():
        assert threading.current_thread() is not threading.main_thread()
        return {"x": [float((weight * 2).requires_grad)]}

    async def answer_later():
        return {"y": [float((weight * 2).requires_grad)]}

    rewards = rewards_of({"one": Returns(answer), "two": Returns(answer_later)}, rows(["a"]))
    assert rewards.components["x"].tolist() == rewards.components["y"].tolist() == [0.0]
    assert torch.is_grad_enabled()


def test_equal_names_of_two_plugins_name_both():
    with pytest.raises(UserError, match=r"one and two both answer the reward 'x'"):
        rewards_of({"one": Returns({"x": [1.0]}), "two": Returns({"x": [1.0]})}, rows(["a"]))


def test_components_keep_the_order_of_the_configuration_and_their_plugins_weight():
    plugins = {
        "one": Returns({"z": [1.0]}, 0.5),
        "two": Returns({"a": [2.0], "two/b": [3.0]}, -2.0),
        "none": Returns(None),
    }
    rewards = rewards_of(plugins, rows(["a"]))
    assert list(rewards.components) == ["z", "a", "two/b"]
    assert rewards.weights == {"z": 0.5, "a": -2.0, "two/b": -2.0}
    assert rewards.total is None
    assert weighted_total(rewards.components, rewards.weights).tolist() == [0.5 * 1 - 2 * 2 - 2 * 3]


def test_a_weight_must_be_finite():
    with pytest.raises(UserError, match=r"plugins\.mine\.weight is a finite number, got nan"):
        rewards_of({"mine": Returns({"x": [1.0]}, NAN)}, rows(["a"]))


def test_a_wrapper_is_pointed_to_transform_rewards():
    class Wrapper(Plugin):
        @hookimpl(wrapper=True)
        def reward(self, rollouts):
            return (yield)

    with pytest.raises(UserError, match=r"plugin 'wrap': reward\(\) is no wrapper.*transform_rewards"):
        rewards_of({"wrap": Wrapper(Wrapper.Config())}, rows(["a"]))


def test_only_the_given_plugins_are_asked():
    plugins = {"one": Returns({"x": [1.0]}), "two": Returns(fail)}
    manager = pluggy.PluginManager("grpozoo")
    manager.add_hookspecs(hooks)
    for name, plugin in plugins.items():
        manager.register(plugin, name)
    assert list(score(manager.hook, {"one": plugins["one"]}, rows(["a"]), None, timeout=5).components) == ["x"]


def test_a_plugin_of_five_lines_is_a_reward():
    class Short(Plugin):
        @hookimpl
        def reward(self, rollouts):
            return {self.name: [-len(text) for text in rollouts.text]}

    rewards = rewards_of({"short": Short(Short.Config())}, rows(["four", ""]))
    assert rewards.components["short"].tolist() == [-4.0, 0.0]
    assert rewards.weights == {"short": 1.0}


# Matrices


def test_matrices_are_ragged_and_a_row_without_answer_is_nan():
    values = [[[1, True], [0.5, None]], None, [], torch.ones(1, 2), np.zeros((0, 2)), torch.zeros(0, 0)]
    rewards = rewards_of({"mine": Returns({"m": values})}, rows(["a"] * 6))
    assert not rewards.components and rewards.weights == {"m": 1.0}
    assert [tuple(matrix.shape) for matrix in rewards.vectors["m"]] == [(2, 2), (1, 2), (0, 2), (1, 2), (0, 2), (0, 2)]
    assert {matrix.dtype for matrix in rewards.vectors["m"]} == {torch.float64}
    assert rewards.vectors["m"][0].nan_to_num(-1).tolist() == [[1, 1], [0.5, -1]]
    assert rewards.vectors["m"][1].isnan().all()


def test_the_width_of_matrices_belongs_to_a_group():
    """Two groups of two rows and one that nobody answered: d = 2, 3, and 1 in want of anything."""
    rollouts = replace(rows(["a"] * 6), group_id=torch.tensor([7, 3, 7, 3, 5, 5]))
    values = [[[1.0, 2.0]], [[1.0, 2.0, 3.0]], None, [], None, []]
    vectors = rewards_of({"mine": Returns({"m": values})}, rollouts).vectors["m"]
    assert [tuple(matrix.shape) for matrix in vectors] == [(1, 2), (1, 3), (1, 2), (0, 3), (1, 1), (0, 1)]
    values[2] = [[1.0, 2.0, 3.0]]
    with pytest.raises(UserError, match="widths 2 and 3 in one group: row 2, prompt 'p2'"):
        rewards_of({"mine": Returns({"m": values})}, rollouts)


@pytest.mark.parametrize("values, message", [
    ([[[1.0]], 2.0], "mixes matrices and numbers: row 1, prompt 'p1'"),
    ([[1.0], [2.0]], "mixes matrices and numbers: row 0"),
    ([[[1.0, 2.0], [3.0]], [[1.0]]], "lines of different lengths in row 0, prompt 'p0'"),
    ([[[1.0]], [[]]], "lines without a number in row 1"),
    ([[[1.0]], [[float("inf")]]], "infinite for row 1, prompt 'p1'"),
    ([torch.ones(1, 1), torch.full((1, 1), float("inf"))], "infinite for row 1, prompt 'p1'"),
    (torch.ones(2, 2, 2, 2), "3 dimensions in row 0"),
])  # fmt: skip
def test_bad_matrices_name_their_row(values, message):
    with pytest.raises(UserError, match=message):
        one(values)


# The total


def test_total_is_the_weighted_sum_of_those_that_answered():
    """1 * (1, 0, nan, nan) + 0.5 * (2, nan, 4, nan) = (2, 0, 2, nan): missing is not 0."""
    components = {
        "a": torch.tensor([1, 0, NAN, NAN], dtype=torch.float64),
        "b": torch.tensor([2, NAN, 4, NAN], dtype=torch.float64),
    }
    total = weighted_total(components, {"a": 1.0, "b": 0.5})
    assert total[:3].tolist() == [2.0, 0.0, 2.0] and total[3].isnan() and total.dtype == torch.float64


def test_a_row_without_any_answer_leaves_the_baseline():
    """Rewards 1, 0, None, None: mean 1/2 of two rows, centred (.5, -.5, none, none)."""
    total = weighted_total({"x": one([1, 0, None, None], 4)}, {"x": 1.0})
    centred = total - group_mean(total, torch.zeros(4, dtype=torch.int64))
    assert centred[:2].tolist() == [0.5, -0.5] and centred[2:].isnan().all()


def test_a_component_of_weight_zero_is_only_watched():
    components = {"a": torch.tensor([1.0, NAN]), "watched": torch.tensor([5.0, 5.0])}
    total = weighted_total(components, {"a": 2.0, "watched": 0.0})
    assert total[0] == 2.0 and total[1].isnan()


def test_without_components_nobody_answered():
    assert weighted_total({}, {}, like=torch.arange(3)).isnan().tolist() == [True] * 3


answers = st.one_of(st.none(), st.booleans(), st.floats(-1e6, 1e6), st.integers(-(10**9), 10**9))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(answers, answers), min_size=1, max_size=8), st.floats(-2, 2), st.randoms())
def test_permuting_rows_permutes_the_total_bit_for_bit(pairs, weight, random):
    def total(rows_of_pairs):
        first, second = zip(*rows_of_pairs, strict=True)
        rewards = rewards_of(
            {"a": Returns({"a": first}), "b": Returns({"b": second}, weight)}, rows(["t"] * len(first))
        )
        return weighted_total(rewards.components, rewards.weights)

    order = list(range(len(pairs)))
    random.shuffle(order)
    torch.testing.assert_close(total([pairs[i] for i in order]), total(pairs)[order], rtol=0, atol=0, equal_nan=True)
