"""From the words of a command line to the configuration that they compose."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType
from omegaconf import DictConfig

from grpozoo.compose import search_path
from grpozoo.errors import UserError


def compose(overrides: list[str]) -> DictConfig:
    """The configuration that the command line would compose."""
    search_path.register()
    check(overrides)
    search_path.check_choices(overrides)
    running = GlobalHydra.instance().hydra  # of the job that asks; Hydra composes for one at a time
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(search_path.CONF), version_base="1.3"):
            return hydra.compose("config", overrides=overrides)
    finally:
        GlobalHydra.instance().hydra = running


def check(overrides: Sequence[str]) -> None:
    """Refuse what Hydra would read in silence as something else, or answer in its own language; say the right words."""
    words = _parsed(overrides)
    known = {*search_path.groups(), *search_path.defaults()}
    for word in words:
        if not word.key_or_group:
            raise UserError(f"the argument {word.input_line!r} has no key\nwrite KEY=VALUE")
        if word.key_or_group in known:
            _check_group(word)
    _check_twice(words, known)


def _parsed(overrides: Sequence[str]) -> list[Override]:
    parser, words = OverridesParser.create(), []
    for text in overrides:
        try:
            words += parser.parse_overrides([text])
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
            said = str(error).split(";")[0]
            raise UserError(f"cannot read the argument {text[:80]!r}...: {said}\nwrite KEY=VALUE") from None
    return words


def _check_group(word: Override) -> None:
    """A group has one word: GROUP=CHOICE or GROUP=[A,B]; + only for a group that is not among the defaults."""
    group, value = word.key_or_group, _text(word)
    ours = search_path.defaults()
    right = f"{'' if group in ours else '+'}{group}={value}"
    if word.type is OverrideType.DEL:
        choice = f"\nwrite {group}={ours[group]}, its default" if ours.get(group) else "\nleave it out"
        raise UserError(f"~{group}: a group is not switched off{choice}, or switch one plugin off with ~plugins.NAME")
    if word.package is not None:
        raise UserError(
            f"{word.input_line}: each choice has its place in the configuration already\nwrite {right}, without @"
        )
    for choice in _choices(word):
        _check_names(group, choice)
    if word.type in (OverrideType.ADD, OverrideType.FORCE_ADD) and group in ours:
        raise UserError(f"{group} is chosen already: write {right}, without + ({group}=[a,b] chooses several)")
    if word.type is not OverrideType.ADD and group not in ours:
        raise UserError(f"{group} is not among the groups that always have a choice: write {right}")


def _check_names(group: str, choice: Any) -> None:
    """One name or several, none of them twice."""
    names = list(choice) if isinstance(choice, list) else [choice]
    if stray := [name for name in names if not isinstance(name, str)]:
        shown = "null" if stray[0] is None else stray[0]
        available = search_path.choices(group)
        raise UserError(
            f"{group}: a choice is a name, or several as {group}=[a,b]; got {shown}"
            + (f"\navailable: {', '.join(available)}" if available else "")
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{group}=[{','.join(names)}] names {twice} twice\nwrite {_joined(group, names)}")
    for name in names:
        search_path.check_file(group, name)


def _check_twice(words: Iterable[Override], groups: set[str]) -> None:
    """Of two choices of a group Hydra keeps the later in silence. Of a key it may: scripts append what they change."""
    said: dict[str, list[Override]] = defaultdict(list)
    for word in words:
        if word.type is not OverrideType.DEL:
            said[word.get_key_element().lstrip("+")].append(word)
    for key, several in said.items():
        if len(several) > 1 and key in groups:
            names = [name for word in several for choice in _choices(word) for name in _listed(choice)]
            raise UserError(
                f"{key} is chosen {len(several)} times, and only the last would count\nwrite {_joined(key, names)}"
            )


def _choices(word: Override) -> list[Any]:
    """What is chosen: one value, or with -m each of the values."""
    value = word.value()
    return value.list if isinstance(value, ChoiceSweep) else [value]


def _listed(choice: Any) -> list[str]:
    return [str(name) for name in choice] if isinstance(choice, list) else [str(choice)]


def _joined(group: str, names: Iterable[str]) -> str:
    """GROUP=A, or GROUP=[A,B] for several."""
    names = list(dict.fromkeys(names))
    return f"{group}={names[0]}" if len(names) == 1 else f"{group}=[{','.join(names)}]"


def _text(word: Override) -> str:
    """The value as it was typed."""
    return word.input_line.partition("=")[2]
