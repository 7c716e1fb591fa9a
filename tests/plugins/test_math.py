"""reward=math: verdicts of math-verify, its time limit, and the life of the child process."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from grpozoo_plugins import math as module
from grpozoo_plugins.math import Math
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_rows import column, rows

from grpozoo import UserError
from grpozoo.rewards import notation

TOWER = "$9^{9^{9^9}}$"  # evaluating it would take longer than the universe


@pytest.fixture(scope="module")
def plugin():
    return Math(Math.Config(seconds=1.0))


@pytest.mark.parametrize("text, answer, expected", [
    (r"so \boxed{\frac{2}{4}}", "1/2", 1.0),
    ("The answer is 1,234.", "1234", 1.0),
    ("$1+x^2$", "x^2+1", 1.0),
    (r"\boxed{x=5}", "5", 1.0),
    (r"\boxed{\frac{3\pi}{4}}", r"\frac{3}{4}\pi", 1.0),
    (r"\boxed{\frac{3}{4}}", r"\frac{3}{4}\pi", 0.0),
    (r"\boxed{41}", "42", 0.0),
    ("no idea", "42", 0.0),
    ("", "42", 0.0),
    (r"\boxed{\frac{}{}", "42", 0.0),
    ("42", None, None),
])  # fmt: skip
def test_verdicts(plugin, text, answer, expected):
    plugin.logged.clear()
    assert column(plugin, "math", rows([text, "1"], [answer, "1"])) == [expected, 1.0]
    assert plugin.logged == [("math/failures", 0.0, 2.0)]


def documented():
    """The rows (answer, completion, verdict) of the table in docs/tasks-and-rewards.md."""
    page = (Path(__file__).parents[2] / "docs" / "tasks-and-rewards.md").read_text()
    table = page.split("<!-- verdicts of reward=math -->\n")[1].split("<!-- end -->")[0]
    cells = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines()[2:]]
    return [
        (answer[1:-1], text[1:-1], {"1": 1.0, "0": 0.0, "none": None}[verdict]) for _, answer, text, verdict in cells
    ]


def test_the_verdicts_in_the_documentation_are_the_codes():
    cases = documented()
    assert len(cases) >= 60
    assert [(*case[:2], module.judge(*case[:2])) for case in cases] == cases


@pytest.mark.parametrize("text, answer", [
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),  # an escaped brace closes nothing
    (r"\boxed{4} \boxed{\frac{1}{2}", "4"),
    ("<answer>1</answer> <answer> 2", "1"),
    (r"<answer>so \boxed{3}</answer> \boxed{4}", "3"),
    ("no mark", "no mark"),
])  # fmt: skip
def test_the_final_answer_of_a_completion(text, answer):
    assert notation.final(text) == answer


@pytest.mark.parametrize("text, expected", [
    (r"2 1/3", "7/3"), ("1.5 1/3", "1.5 1/3"), (r"1\,234\,567", "1234567"), ("12 345", "12345"), ("1 2", "1 2"),
    ("2.5E-2", "0.025"), ("x1e3", "x1e3"), ("2e", "2e"), (r"0.1\overline{6}", "1/6"), ("0.\\overline9", "1/1"),
    ("spin", "spin"), ("2pi", r"2\pi "), ("sin(x)", r"\sin (x)"), ("single", "single"), ("√(a+b)", r"\sqrt{a+b}"),
])  # fmt: skip
def test_notations_are_written_in_one_way(text, expected):
    assert notation.plain(text) == expected


@settings(deadline=None)
@given(st.text("5.,/%$ \\{}boxedansweriπ√:^_()", max_size=40), st.text("5ab {}\\text$", max_size=12))
def test_no_completion_makes_the_notation_raise(text, answer):
    words = notation.wording(answer)
    notation.plain(notation.final(text)), notation.is_prose(answer), notation.without_unit(answer)
    assert notation.says(text, words or "x") in (True, False) and not (words and notation.is_prose(answer))


def test_a_pathological_expression_ends_in_time_and_is_missing_not_zero(plugin):
    plugin.logged.clear()
    start = time.monotonic()
    assert column(plugin, "math", rows([TOWER, "5", "4"], ["5", "5", "5"])) == [None, 1.0, 0.0]
    assert time.monotonic() - start < 15  # one second of work, the rest is the new child's start
    assert plugin.logged == [("math/failures", pytest.approx(1 / 3), 3.0)]


def test_an_answer_that_cannot_be_read_is_a_failure_and_not_a_zero(plugin):
    plugin.logged.clear()
    assert column(plugin, "math", rows(["5", "5"], ["", "5"])) == [None, 1.0]
    assert plugin.logged == [("math/failures", 0.5, 2.0)]


def test_it_works_off_the_main_thread_and_touches_no_signal(plugin):
    before, found = signal.getsignal(signal.SIGALRM), []
    thread = threading.Thread(target=lambda: found.append(plugin.worker.ask("1/2", "0.5")))
    thread.start()
    thread.join(30)
    assert found == [1.0] and signal.getsignal(signal.SIGALRM) is before


def test_a_child_killed_from_outside_is_replaced(plugin):
    assert plugin.worker.ask("5", "5") == 1.0
    plugin.worker.process.kill()
    plugin.worker.process.wait()
    assert plugin.worker.ask("5", "5") == 1.0


def test_one_child_serves_the_whole_run(plugin):
    assert plugin.worker.ask("5", "5") == 1.0
    child = plugin.worker.process.pid
    assert column(plugin, "math", rows(["5"] * 20, ["5"] * 20)) == [1.0] * 20
    assert plugin.worker.process.pid == child


def test_the_child_ends_with_the_plugin_and_leaves_no_zombie():
    mortal = Math(Math.Config())
    assert mortal.worker.ask("5", "5") == 1.0
    child = mortal.worker.process.pid
    del mortal
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_the_child_ends_with_the_run_even_a_killed_one(end):
    start = "import os\nfrom grpozoo_plugins.math import Worker\nw = Worker(1.0)\nw.ask('5', '5')\n"
    code = f"{start}print(w.process.pid, flush=True)\n{end}"
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the child is still there")


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'needs the package math-verify: pip install "grpozoo\[math\]"'):
        Math(Math.Config())


def test_a_broken_package_is_an_error_and_not_a_zero(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no antlr here')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"worker process does not start: ImportError\('no antlr here'\)"):
        Math(Math.Config()).worker.ask("5", "5")


def test_a_task_without_answers_is_an_error():
    with pytest.raises(UserError, match=r"plugins\.math: no prompt has an answer to compare with"):
        column(Math(Math.Config()), "math", rows(["5"], [None]))


def test_the_time_limit_is_positive():
    with pytest.raises(ValueError, match="seconds is positive, got 0"):
        Math.Config(seconds=0)
