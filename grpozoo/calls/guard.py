"""Calling a plugin: whatever goes wrong in a hook is told with the plugin, the hook, what came and what is expected.

Every implementation is called through a `Guard`. An exception (SystemExit included), an answer that
`grpozoo.calls.answers` does not expect, and an argument that was changed in place become UserErrors. A UserError and
KeyboardInterrupt pass as they are. The cause stays attached: HYDRA_FULL_ERROR=1 shows its traceback.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pluggy

from grpozoo.calls.answers import EXPECTED, WITHOUT_ANSWER, Unfit, described
from grpozoo.calls.inputs import contents, differing, version, versions
from grpozoo.errors import UserError
from grpozoo.hooks import KINDS

COPIED = 3  # first calls of a hook whose inputs are compared as a whole: two passes of an evaluation, one of training
SMALL = 2**24  # numbers in the tensors of a call above which they are not copied
DATA = ("rollouts", "rewards", "advantages", "batch", "out", "requests", "prompts")  # arguments that stay as they are


def guard(manager: pluggy.PluginManager, plugin: Any) -> None:
    """Call the hooks of a registered plugin through guards, which are given every argument of the hook."""
    for caller in manager.get_hookcallers(plugin) or ():
        for impl in caller.get_hookimpls():
            if impl.plugin is plugin:
                arguments = tuple(caller.spec.argnames)
                impl.function = Guard(caller.name, arguments, impl).stand_in()
                impl.argnames, impl.kwargnames = arguments, ()


def ignore(hook: str, implementations: Any, given: Any) -> None:
    """To be called before every hook: pluggy asks for both."""


def nobody_answered(outcome: Any, hook: str, implementations: Any, given: Any) -> None:
    """To be called after every hook: one that needs a value and got None from all."""
    if KINDS.get(hook) not in ("one", "chain") or outcome.exception is not None or outcome.get_result() is not None:
        return
    names = ", ".join(sorted({impl.plugin_name for impl in implementations}))
    outcome.force_exception(
        UserError(f"{hook}(): everybody answered None ({names})\nexpected: an answer of one of them")
    )


@contextmanager
def blamed(plugin: str, what: str, innocent: BaseException | None = None, apart: tuple = ()) -> Iterator[None]:
    """Exceptions of the block become UserErrors that name the plugin and what was asked of it, e.g. `advantage()`.

    innocent: an exception, and apart: classes of exceptions, that pass as they are.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, GeneratorExit, *apart):
        raise
    except BaseException as error:  # SystemExit would end the run in silence
        if error is innocent:
            raise
        raise raised(plugin, what, error) from error


def raised(plugin: str, what: str, error: BaseException) -> UserError:
    """The error for an exception in a plugin."""
    return UserError(f"plugins.{plugin}: {what} raised {error!r:.300}\nat {place(error)}")


def changed(plugin: str, hook: str, path: str) -> UserError:
    """The error for an input that a plugin changed."""
    return UserError(
        f"plugins.{plugin}: {hook}() changed {path} in place\n"
        "expected: inputs stay as they are, others read them; dataclasses.replace() and clone() make new ones"
    )


def place(error: BaseException) -> str:
    """file:line of the innermost frame that is neither ours here, the standard library's nor an installed package's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in (__file__, pluggy.__file__)]
    foreign = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    own = [frame for frame in frames if not frame.filename.startswith((*foreign, "<frozen"))]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


class Guard:
    """One implementation of a hook, and what is watched while it runs."""

    def __init__(self, hook: str, arguments: Sequence[str], impl: Any):
        self.hook, self.arguments, self.plugin, self.function = hook, tuple(arguments), impl.plugin_name, impl.function
        self.wrapper, self.old_wrapper = impl.wrapper, impl.hookwrapper
        self.positional, self.keywords = tuple(impl.argnames), tuple(impl.kwargnames)
        self.calls = 0

    def stand_in(self) -> Callable:
        """What takes the place of the implementation."""
        return self.around if self.wrapper or self.old_wrapper else self.plain

    def plain(self, *arguments: Any, **named: Any) -> Any:
        """An implementation that answers."""
        given = self._given(arguments, named)
        with self._watched(given):
            answer = self._ask(given)
        if answer is not None or self.hook in WITHOUT_ANSWER:
            self._check(answer, given, None)
        return answer

    def around(self, *arguments: Any, **named: Any) -> Generator[None, Any, Any]:
        """An implementation that wraps the others: it yields once and returns what it makes of their answer."""
        given, inner = self._given(arguments, named), None
        with self._watched(given):
            controller = self._ask(given)
            try:
                next(controller)
            except StopIteration:
                raise self._error("ended without a yield", "a wrapper yields once") from None
        try:
            inner = yield
        except BaseException as error:  # of those inside: the plugin may tidy up, or answer in their place
            answer = self._resumed(lambda fault=error: controller.throw(fault), given, innocent=error)
        else:
            answer = self._resumed(lambda: controller.send(inner), given)
        if self.old_wrapper:
            return inner.get_result() if inner is not None else None
        self._check_wrapped(answer, given, inner)
        return answer

    def _given(self, arguments: tuple, named: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        return {**dict(zip(self.arguments, arguments, strict=False)), **named}

    def _ask(self, given: dict[str, Any]) -> Any:
        keywords = {name: given[name] for name in self.keywords if name in given}
        return self.function(*(given[name] for name in self.positional), **keywords)

    def _resumed(self, step: Callable, given: dict[str, Any], innocent: BaseException | None = None) -> Any:
        """What a wrapper returns after its yield."""
        with self._watched(given, innocent):
            try:
                step()
            except StopIteration as stop:
                return stop.value
        raise self._error("has a second yield", "a wrapper yields once")

    def _check(self, answer: Any, given: dict[str, Any], inner: Any) -> None:
        try:
            EXPECTED[self.hook](answer, inner=inner, **given)
        except Unfit as unfit:
            raise self._error(f"answered {unfit.came}", unfit.expected) from None

    def _check_wrapped(self, answer: Any, given: dict[str, Any], inner: Any) -> None:
        if KINDS[self.hook] in ("one", "chain"):
            if answer is None and inner is not None:
                raise self._error("answered None", "a wrapper returns what it made of the answer that `yield` gave it")
            if answer is not None:
                self._check(answer, given, inner)
            return
        if not isinstance(answer, list):
            raise self._error(f"answered {described(answer)}", "a wrapper of this hook returns the list from `yield`")
        for item in answer:
            self._check(item, given, None)

    def _error(self, what: str, expected: str) -> UserError:
        return UserError(f"plugins.{self.plugin}: {self.hook}() {what}\nexpected: {expected}")

    @contextmanager
    def _watched(self, given: dict[str, Any], innocent: BaseException | None = None) -> Iterator[None]:
        """Exceptions are told by name, and so is an argument that the block changed in place."""
        data = {name: given[name] for name in DATA if name in given}
        before = [look for name, value in data.items() for look in versions(value, name)]
        whole = self.calls <= COPIED and sum(tensor.numel() for _, tensor, _ in before) <= SMALL
        copies = {name: contents(value, name) for name, value in data.items()} if whole else {}
        with blamed(self.plugin, f"{self.hook}()", innocent):
            yield
        path = next((path for path, tensor, count in before if version(tensor) != count), None)
        for name, copy in copies.items():
            path = path or differing(copy, contents(data[name], name))
        if path:
            raise changed(self.plugin, self.hook, path)
