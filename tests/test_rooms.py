"""The layers of the package, drawn from its source.

A room is a file or a folder at the top of grpozoo/; an arrow is an import between two of them, in a function body or for
type checkers as well. Arrows stay on their floor or go down, and lead back to where they started by no way.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from grpozoo.moved import MOVED

ROOT = Path(__file__).resolve().parent.parent / "grpozoo"
SURFACE = "__init__"
FLOORS = {  # from the ground up; a room that is on none must be given its place here
    "contract": {"errors", "types", "hooks", "ops", "metrics", "rng", "config", "context", SURFACE},
    "parts": {"cycle", "packing", "sampling", "storage"},
    "tasks": {"evaluate", "tasks"},
    "policy": {"models", "policy", "rollout"},
    "composition": {"compose"},
    "algorithm": {"rewards", "update", "loop"},
    "run": {"run", "testing"},
    "command line": {"cli", "__main__"},
}
EXEMPT = {"moved"}  # it names other rooms in strings, by what they were called, and imports none by itself


def rooms(root=ROOT):
    """Name -> files."""
    found = {file.stem: [file] for file in root.glob("*.py")}
    found |= {folder.parent.name: sorted(folder.parent.rglob("*.py")) for folder in root.glob("*/__init__.py")}
    return {name: files for name, files in found.items() if name not in EXEMPT}


def imported(file):
    """(dotted name, line) of everything that a file imports, at any depth; the names of a `from` are part of it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def arrows(root=ROOT):
    """(from room, to room) -> where, the first place that draws it."""
    known, found = rooms(root), {}
    for room, files in known.items():
        for file in files:
            for name, line in imported(file):
                package, *rest = name.split(".")
                target = next((part for part in rest[:1] if part in known), SURFACE)
                target = MOVED.get(rest[0], target).split(".")[0] if rest else target
                if package == root.name and target != room and not set(rest[:1]) & EXEMPT:
                    found.setdefault((room, target), f"{file.relative_to(root.parent)}:{line}")
    return found


def circle(drawn):
    """The rooms of one circle, first and last the same; null: there is none."""
    below = {}
    for start, end in drawn:
        below.setdefault(start, set()).add(end)
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return None


def plan():
    """The floors as declared, the highest first."""
    return "\n".join(f"  {floor:<18} {' '.join(sorted(held))}" for floor, held in reversed(FLOORS.items()))


def upward(drawn):
    """Each arrow that goes up, as a line."""
    height = {room: number for number, held in enumerate(FLOORS.values()) for room in held}
    return [
        f"{start} imports {end}, which is above it: {place}"
        for (start, end), place in drawn.items()
        if height[start] < height[end]
    ]


def test_every_room_has_one_floor():
    declared = [room for held in FLOORS.values() for room in held]
    assert sorted(declared) == sorted(rooms()), f"rooms and declared floors differ\n{plan()}"


def test_no_way_leads_from_a_room_back_to_it():
    drawn = arrows()
    if (found := circle(drawn)) is not None:
        places = "\n".join(f"  {pair[0]} -> {pair[1]}: {drawn[pair]}" for pair in zip(found, found[1:], strict=False))
        pytest.fail(f"a circle of rooms: {' -> '.join(found)}\n{places}\nthe floors:\n{plan()}")


def test_no_room_imports_one_that_is_above_it():
    wrong = upward(arrows())
    assert not wrong, "\n".join([*wrong, "the floors:", plan()])


@pytest.mark.parametrize("room", sorted(rooms()))
def test_no_module_of_ours_uses_an_old_name(room):
    """It would hide an arrow, and an old name is for what others froze."""
    assert [
        (file.name, name)
        for file in rooms()[room]
        for name, _ in imported(file)
        if name.split(".")[0] == ROOT.name and name.split(".")[1:2] and name.split(".")[1] in MOVED
    ] == []


def test_a_circle_and_an_arrow_upwards_are_found_inside_a_function_and_in_a_folder(tmp_path):
    root = tmp_path / "grpozoo"
    (root / "run").mkdir(parents=True)
    for name, text in {
        "__init__": "", "ops": "def f():\n    from grpozoo.run.state import g\n", "run/__init__": "",
        "run/state": "from grpozoo import rng\n", "rng": "import grpozoo.ops\n",
    }.items():  # fmt: skip
        (root / f"{name}.py").write_text(text)
    drawn = arrows(root)
    assert drawn == {
        ("ops", "run"): "grpozoo/ops.py:2", ("run", "rng"): "grpozoo/run/state.py:1", ("rng", "ops"): "grpozoo/rng.py:1",
    }  # fmt: skip
    found = circle(drawn)
    assert found[0] == found[-1] and all(pair in drawn for pair in zip(found, found[1:], strict=False))
    assert upward(drawn) == ["ops imports run, which is above it: grpozoo/ops.py:2"]
    assert circle({("run", "ops"): "", ("cli", "run"): ""}) is None
