"""While rewards are asked, which the main process does alone, nothing may wait for the other processes: they never come."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from grpozoo.errors import UserError

_asking: list[None] = []  # one entry while reward plugins are being asked, by whichever thread


class Alone(UserError):
    """A method that every process must call was called inside reward()."""


@contextmanager
def asking() -> Iterator[None]:
    """The block asks the reward plugins."""
    _asking.append(None)
    try:
        yield
    finally:
        _asking.pop()


def collective(method: Callable) -> Callable:
    """Mark a method of a run or of one of its parts that every process must call: inside reward() it is refused, on one process too."""

    @wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if _asking:
            raise Alone(
                f"run.{method.__name__}() was called inside reward(), which the main process alone is asked: with two "
                "processes it would wait for ever\nsample and measure in transform_rewards() or resample(), in evaluate() "
                "for a metric; they run in every process"
            )
        return method(self, *arguments, **named)

    call.collective = True
    return call
