"""While rewards are asked, which the main process does alone, nothing may wait for the other processes: they never come."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from grpozoo.errors import UserError

_asked: set[int] = set()  # id of each run whose reward plugins are being asked


class Alone(UserError):
    """A method that every process must call was called inside reward()."""


@contextmanager
def asking(run: Any) -> Iterator[None]:
    """The block asks the reward plugins of `run`."""
    _asked.add(id(run))
    try:
        yield
    finally:
        _asked.discard(id(run))


def collective(method: Callable) -> Callable:
    """Mark a method of a run that every process must call: inside reward() it is refused, on one process too."""

    @wraps(method)
    def call(run: Any, *arguments: Any, **named: Any) -> Any:
        if id(run) in _asked:
            raise Alone(
                f"run.{method.__name__}() was called inside reward(), which the main process alone is asked: with two "
                "processes it would wait for ever\nsample and measure in transform_rewards() or resample(), in evaluate() "
                "for a metric; they run in every process"
            )
        return method(run, *arguments, **named)

    call.collective = True
    return call
