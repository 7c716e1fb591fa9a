"""What plugins ask of `run`: the protocol, the training run, and the kit's stand-in name the same things."""

import ast
import inspect
from pathlib import Path

import pytest

from grpozoo import context
from grpozoo.run.run import Run
from grpozoo.testing.context import Context as StandIn

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = {
    *context.Context.__annotations__,
    *(name for name, value in vars(context.Context).items() if inspect.isfunction(value) and not name.startswith("_")),
}


def given(cls):
    """Names that an instance has: those of the class, and those that its methods set on self."""
    names = set(dir(cls))
    for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(cls)))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


@pytest.mark.parametrize("cls", [Run, StandIn])
def test_who_runs_hooks_answers_the_whole_protocol(cls):
    assert MEMBERS - given(cls) == set()


@pytest.mark.parametrize("file", sorted((ROOT / "plugins").glob("*.py")), ids=lambda file: file.stem)
def test_a_plugin_asks_run_for_nothing_else(file):
    used = {
        node.attr
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "run"
    }
    assert used <= MEMBERS


def test_signatures_of_the_protocol_are_those_of_the_run():
    from grpozoo.run.ask import Ask
    from grpozoo.run.passes import Passes
    from grpozoo.run.processes import Processes

    for name in MEMBERS - set(context.Context.__annotations__):
        owner = next(cls for cls in (Run, Ask, Passes, Processes) if name in vars(cls))
        assert list(inspect.signature(getattr(owner, name)).parameters) == list(
            inspect.signature(getattr(context.Context, name)).parameters
        ), name
