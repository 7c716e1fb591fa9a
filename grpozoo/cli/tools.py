"""The tools around training: `grpozoo plugins`, `grpozoo check`, `grpozoo explain`, `grpozoo warm-start`."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

from grpozoo.compose.plugins import check_class, check_hooks
from grpozoo.compose.registry import installed, load_class, owner
from grpozoo.errors import UserError, unknown
from grpozoo.hooks import KINDS

HELP = {
    "warm-start": """grpozoo warm-start [KEY=VALUE ...]
Train the starting weights of the tiny policy on worked solutions of the task, and put them into the cache.
  grpozoo warm-start
  grpozoo warm-start task.level=3 model.layers=6""",
    "plugins": """grpozoo plugins [NAME ...]
List the installed plugins (or those named): distribution, hooks with their kinds, what they are; broken ones with their error.""",
    "explain": """grpozoo explain metrics | RUN_FOLDER | [KEY=VALUE ...]
Say what each metric means, who did what in a run and where it stands, or what a command line would run: its plugins in
the order of application, who answers which hook, and what there is to know beforehand.
  grpozoo explain algo=[ONE,OTHER] sampler=iid""",
    "card": """grpozoo card NAME
What one method is, made from its code: source, equations, options, needs, what it stacks with and what not, and why.""",
    "layer-scan": """grpozoo layer-scan [--layers 0,1,2] [--seeds 0,1,2] [--metric heldout/avg@8] [--folder FOLDER] [KEY=VALUE ...]
Train everything and each decoder layer alone with the same options, one run after the other, and write what each layer
contributes: profile.json (for params=top plugins.layers.profile=FILE), profile.md and profile.png.
  grpozoo layer-scan --seeds 0,1,2 steps=60 lr=3e-4""",
    "check": """grpozoo check NAME [KEY=VALUE ...]
Run the conformance kit over a plugin, as switched on by the given arguments (default: its config file).
  grpozoo check mine
  grpozoo check mine algo=[mine,other] plugins.mine.x=2""",
}


def run(tool: str, arguments: list[str]) -> int:
    """Run a tool; returns the exit status."""
    if {"--help", "-h"} & set(arguments):
        print(HELP[tool])
        return 0
    return RUNNERS[tool](arguments)


def warm_start(arguments: list[str]) -> int:
    """Starting weights for the composed configuration."""
    from grpozoo.cli import warm_start
    from grpozoo.compose.command import compose

    return warm_start.run(compose(arguments)) or 0


def explain(arguments: list[str]) -> int:
    """Metrics, a run, or a command line."""
    from grpozoo.cli import explain

    if not arguments or all("=" in argument or argument[0] in "+~" for argument in arguments):
        print(explain.command(arguments))
        return 0
    if len(arguments) != 1:
        raise UserError(f"explain takes one name or folder, or KEY=VALUE arguments\n{HELP['explain']}")
    classes = {name: cls for name, cls in classes_of(installed()).items() if not isinstance(cls, UserError)}
    folder = Path(arguments[0])
    print(
        explain.metrics(classes) if arguments[0] == "metrics" and not folder.is_dir() else explain.run(folder, classes)
    )
    return 0


def plugins(arguments: list[str]) -> int:
    """A table of plugins; status 1 if one of them is broken."""
    known = installed()
    for name in arguments:
        if name not in known:
            raise unknown("plugin", name, known)
    classes = classes_of(arguments or known)
    for name, cls in sorted(classes.items()):
        print(f"{name}  ({owner(name)})")
        print("\n".join(f"    {line}" for line in describe(cls)))
    return int(any(isinstance(cls, UserError) for cls in classes.values()))


def classes_of(names) -> Mapping[str, type | UserError]:
    """Name -> class, or what is wrong with it: it does not import, is no plugin, or does not fit the hooks."""
    found, entries = {}, installed()
    for name in names:
        try:
            cls = load_class(name, found=entries)
            check_class(name, cls, entries[name])
            check_hooks(name, cls)
            found[name] = cls
        except UserError as error:
            found[name] = error
    return found


def describe(cls: type | UserError) -> list[str]:
    """The lines about one plugin."""
    if isinstance(cls, UserError):
        return ["BROKEN", *str(cls).splitlines()]
    text = inspect.getdoc(inspect.getmodule(cls)) or inspect.getdoc(cls) or ""
    marks = {hook: getattr(getattr(cls, hook, None), "grpozoo_impl", None) for hook in KINDS}
    hooks = [f"{hook} ({KINDS[hook]}{', wrapper' if mark['wrapper'] else ''})" for hook, mark in marks.items() if mark]
    options = ", ".join(cls.Config.__dataclass_fields__) or "none"
    return [
        text.splitlines()[0] if text else "(no docstring)",
        f"hooks: {', '.join(hooks) or 'none'}",
        f"options: {options}",
    ]


def card(arguments: list[str]) -> int:
    """The card of a method."""
    from grpozoo.cli import card

    if len(arguments) != 1:
        raise UserError(f"card takes the name of a method\n{HELP['card']}")
    print(card.card(arguments[0]))
    return 0


def layer_scan(arguments: list[str]) -> int:
    """Contributions of the decoder layers."""
    from grpozoo.cli import layer_scan

    return layer_scan.run(arguments)


def check(arguments: list[str]) -> int:
    """The conformance kit; status 1 if a check fails."""
    if not arguments or "=" in arguments[0]:
        raise UserError(f"check needs the name of a plugin\n{HELP['check'].splitlines()[0]}")
    name, *overrides = arguments
    if name not in installed():
        raise unknown("plugin", name, installed())
    from grpozoo.testing import CHECKS, ConformanceError, check_plugin

    try:
        done = check_plugin(name, *overrides)
    except ConformanceError as error:
        print(error)
        return 1
    print(f"{name} ({owner(name)}) passes {len(done)} checks: {', '.join(done)}")
    print(f"not applicable: {', '.join(check.name for check in CHECKS if check.name not in done) or 'none'}")
    return 0


RUNNERS: dict[str, Callable[[list[str]], int]] = {
    "warm-start": warm_start,
    "plugins": plugins,
    "explain": explain,
    "card": card,
    "layer-scan": layer_scan,
    "check": check,
}
