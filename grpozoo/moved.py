"""Modules that an earlier release had at another place: their old names go on importing, so that frozen plugins run.

A name here is never removed while HOOK_VERSION stays the same; new code uses the place of now.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

MOVED = {
    "answers": "rewards.answers",
    "cache": "storage",
    "checkpoint": "run.checkpoint",
    "data": "compose.task",
    "head": "policy.head",
    "judge": "rewards.judge",
    "plugins": "compose.plugins",
    "prefix": "policy.frozen",
    "progress": "run.progress",
    "scaffold": "tasks.scaffold",
    "score": "rewards.score",
    "search_path": "compose.search_path",
    "settings": "compose.settings",
    "stacking": "compose.stacking",
    "state": "run.state",
    "tracking": "run.tracking",
    "warm_start": "models.warm_start",
}  # old -> new, both below grpozoo


class _Moved(MetaPathFinder, Loader):
    """Answers an old name with the module itself, not with a copy: its classes stay the same objects."""

    def find_spec(self, fullname, path=None, target=None):
        package, _, name = fullname.rpartition(".")
        return ModuleSpec(fullname, self) if package == "grpozoo" and name in MOVED else None

    def create_module(self, spec):
        module = import_module(f"grpozoo.{MOVED[spec.name.rpartition('.')[2]]}")
        self.spec = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self.spec  # the import system has put the old name's there


def install() -> None:
    """Once, when the package is imported. Last in line: a module that exists is never shadowed."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
