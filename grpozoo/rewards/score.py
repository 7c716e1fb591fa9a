"""Rewards: what every plugin answered, asked for under a time limit, checked, and brought into one form.

    number, bool, 0-d tensor      its value, float64         None, NaN       no answer: the row stays, its value is NaN
    inf, text, anything else      UserError                  wrong length    UserError with both numbers
    exception                     UserError with its place   too slow        UserError after `timeout` seconds

A failure never becomes a 0. Plain functions run one after the other in a thread, coroutines meanwhile and together in
one event loop that lives as long as the process, so that clients with open connections survive from step to step.
The thread gives up on what sleeps, waits or loops in Python; code that holds the interpreter's lock (a runaway regular
expression of `re`, a huge power) has to guard itself, in a child process or by a limit of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from grpozoo.calls.guard import changed, raised
from grpozoo.calls.inputs import version, versions
from grpozoo.errors import UserError
from grpozoo.rewards.asking import Alone, asking
from grpozoo.types import Rewards, Rollouts

if TYPE_CHECKING:
    from torch import Tensor

    from grpozoo.hooks import Plugin

_loop: asyncio.AbstractEventLoop | None = None  # of the coroutines; replaced when one of them was given up


def score(hooks: Any, plugins: Mapping[str, Plugin], rollouts: Rollouts, run: Any, *, timeout: float) -> Rewards:
    """Ask those of `plugins` (name -> plugin) that implement the hook `reward`; `total` stays None.

    hooks: the manager's hooks. timeout: seconds for each plugin's call. Components keep the order of registration;
    a component's weight is `config.weight` of the plugin that brought it, 1 where its options have none.
    """
    components, vectors, weights, owner = {}, {}, {}, {}
    with asking():
        answers = _ask(hooks, plugins, rollouts, run, timeout)
    for name, answer in answers:
        for key, values in _checked(name, answer).items():
            if key in owner:
                both = f"{owner[key]} and {name}"
                raise UserError(f"{both} both answer the reward {key!r}: rename one, or drop one with ~plugins.NAME")
            owner[key] = name
            weights[key] = _weight(name, plugins[name])
            column = _column(values, rollouts, f"plugins.{name}: reward {key!r}")
            (vectors if isinstance(column, tuple) else components)[key] = column
    return Rewards(components, weights, vectors)


# Asking


def _ask(hooks, plugins, rollouts, run, timeout) -> list[tuple[str, Any]]:
    """(plugin name, its answer) in the order of registration."""
    given = {"rollouts": rollouts, "run": run}
    started: list[tuple[str, Future, float]] = []
    later: list[str] = []  # plugins that answered with a coroutine
    before = list(versions(rollouts, "rollouts"))
    try:
        for impl in hooks.reward.get_hookimpls():
            name = impl.plugin_name
            if name not in plugins:
                continue
            if impl.wrapper or impl.hookwrapper:
                raise UserError(
                    f"plugin {name!r}: reward() is no wrapper; change others' rewards in transform_rewards()"
                )
            call, start = _bound(impl, {key: given[key] for key in impl.argnames}), time.monotonic()
            future = _in_thread(call)
            answer = _settled(name, future, start + timeout, timeout)
            if inspect.isawaitable(answer):
                start, future = time.monotonic(), asyncio.run_coroutine_threadsafe(_awaited(answer), _event_loop())
                later.append(name)
            started.append((name, future, start + timeout))
        answers = [(name, _settled(name, future, deadline, timeout)) for name, future, deadline in started]
    except BaseException:
        for _, future, _ in started:
            future.cancel()
        raise
    if path := next((path for path, tensor, count in before if version(tensor) != count), None):
        raise changed(" or ".join(later), "reward", path)  # coroutines wait together: it was one of them
    return answers


def _bound(impl: Any, arguments: dict[str, Any]) -> Callable[[], Any]:
    return lambda: impl.function(**arguments)


def _in_thread(call: Callable[[], Any]) -> Future:
    """Run in a daemon thread, which a hanging call may keep without keeping the process."""
    future: Future = Future()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def work():
        _prepare_thread(device)
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return future


def _prepare_thread(device: int | None) -> None:
    """Gradient mode and the current device belong to a thread: no reward records a graph, all use the run's device."""
    torch.set_grad_enabled(False)
    if device is not None:
        torch.cuda.set_device(device)


async def _awaited(answer: Any) -> Any:
    return await answer


def _event_loop() -> asyncio.AbstractEventLoop:
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def work(loop):
            _prepare_thread(device)
            loop.run_forever()

        threading.Thread(target=work, args=(_loop,), name="async rewards", daemon=True).start()
    return _loop


def _settled(name: str, future: Future, deadline: float, timeout: float) -> Any:
    """The future's result, or a UserError that names the plugin."""
    wait([future], timeout=max(deadline - time.monotonic(), 0))
    if not future.done():
        _abandon_loop()
        raise UserError(
            f"plugins.{name}: reward() did not answer within {timeout:g} s (a missing answer is no 0)\n"
            "make it faster, or set reward_timeout=SECONDS"
        )
    try:
        return future.result()
    except Alone as error:
        raise UserError(f"plugins.{name}: {error}") from error
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # asyncio's CancelledError and SystemExit are the plugin's failures too
        raise raised(name, "reward()", error) from error


def _abandon_loop() -> None:
    """A coroutine that hangs may block its loop for ever: the next call gets a new one."""
    global _loop
    if _loop is not None:
        _loop.call_soon_threadsafe(_loop.stop)
        _loop = None


# Checking


def _checked(name: str, answer: Any) -> Mapping[str, Any]:
    if answer is None:
        return {}
    if not isinstance(answer, Mapping):
        raise UserError(
            f"plugins.{name}: reward() returns {{name: one number per completion}}, got {type(answer).__name__}"
        )
    return answer


def _weight(name: str, plugin: Plugin) -> float:
    weight = float(getattr(plugin.config, "weight", 1.0))
    if not math.isfinite(weight):
        raise UserError(f"plugins.{name}.weight is a finite number, got {weight}")
    return weight


def _column(values: Any, rollouts: Rollouts, where: str) -> Tensor | tuple[Tensor, ...]:
    """One component: [R] float64, or R matrices [m, d] float64 where a row's answer has two dimensions."""
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)) or getattr(values, "ndim", 1) == 0:
        raise UserError(f"{where} is one number per completion ({len(rollouts)} of them), got {type(values).__name__}")
    rows = list(values)
    if len(rows) != len(rollouts):
        raise UserError(f"{where} has {len(rows)} values for {len(rollouts)} completions")
    if any(isinstance(row, (list, tuple)) or getattr(row, "ndim", 0) for row in rows):
        return _matrices(rows, rollouts, where)
    numbers = [_number(row, i, rollouts, where) for i, row in enumerate(rows)]
    return torch.tensor(numbers, dtype=torch.float64)


def _number(value: Any, row: int, rollouts: Rollouts, where: str) -> float:
    if hasattr(value, "tolist"):  # a 0-d tensor or array, a numpy scalar
        value = value.tolist()
    if value is None:
        return math.nan
    if not isinstance(value, (Real, Decimal)):
        raise UserError(
            f"{where} is {value!r:.60} ({type(value).__name__}) for {_row(rollouts, row)}\n"
            "a number is expected, or None for no answer"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise UserError(f"{where} is infinite for {_row(rollouts, row)}; a finite number is expected, or None")
    return number


def _row(rollouts: Rollouts, row: int) -> str:
    return f"row {row}, prompt {rollouts.prompts[row].id!r}"


def _matrices(rows: list[Any], rollouts: Rollouts, where: str) -> tuple[Tensor, ...]:
    """R matrices [m, d] float64, m >= 0 of each its own, d the same within a group. No answer: one row of NaN."""
    matrices = [None if row is None else _matrix(row, i, rollouts, where) for i, row in enumerate(rows)]
    groups, widths = rollouts.group_id.tolist(), {}  # group -> its d
    for i, (group, matrix) in enumerate(zip(groups, matrices, strict=True)):
        if matrix is None or matrix.ndim < 2:
            continue
        width = widths.setdefault(group, matrix.shape[1])
        if width != matrix.shape[1]:
            raise UserError(
                f"{where} has matrices of widths {width} and {matrix.shape[1]} in one group: {_row(rollouts, i)}\n"
                "[m, d] with one d for all completions of a prompt is expected"
            )

    def full(matrix: Tensor | None, d: int) -> Tensor:
        if matrix is None:
            return torch.full((1, d), torch.nan, dtype=torch.float64)
        return matrix if matrix.ndim == 2 else torch.zeros(0, d, dtype=torch.float64)

    return tuple(full(matrix, widths.get(group, 1)) for group, matrix in zip(groups, matrices, strict=True))


def _matrix(row: Any, i: int, rollouts: Rollouts, where: str) -> Tensor:
    """[m, d] float64, or [0] for an empty list, whose width the other rows tell."""
    if not isinstance(row, torch.Tensor):
        lines = row.tolist() if hasattr(row, "tolist") else row
        if not isinstance(lines, (list, tuple)) or not all(isinstance(line, (list, tuple)) for line in lines):
            raise UserError(f"{where} mixes matrices and numbers: {_row(rollouts, i)}, is {row!r:.60}")
        if len({len(line) for line in lines}) > 1:
            raise UserError(f"{where} has lines of different lengths in {_row(rollouts, i)}")
        shape = row.shape if hasattr(row, "shape") else (len(lines), len(lines[0])) if lines else (0,)
        numbers = [[_number(x, i, rollouts, where) for x in line] for line in lines]
        row = torch.tensor(numbers, dtype=torch.float64).reshape(shape)
    if row.ndim != 2 and row.shape != (0,):
        raise UserError(f"{where} has {row.ndim} dimensions in {_row(rollouts, i)}; a number or a matrix is expected")
    if row.shape[-1] == 0:
        if len(row):
            raise UserError(f"{where} has lines without a number in {_row(rollouts, i)}")
        row = row.reshape(0)
    row = row.detach().to("cpu", torch.float64)
    if row.isinf().any():
        raise UserError(f"{where} is infinite for {_row(rollouts, i)}")
    return row
