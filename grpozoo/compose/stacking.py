"""Which methods stack: every pair of methods, put together as the command line would, without a model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from grpozoo.compose import search_path
from grpozoo.compose.plugins import Active, activate
from grpozoo.compose.registry import installed
from grpozoo.compose.settings import command_line
from grpozoo.config import Config
from grpozoo.errors import UserError

GROUP = "algo"
BESIDE = ("sampler", "params")  # groups whose choices are methods too, one at a time


@cache
def _found() -> dict[str, EntryPoint]:
    return installed()


@cache
def group_of(choice: str) -> str:
    """The group that a method is chosen in."""
    return next((group for group in BESIDE if choice in search_path.choices(group)), GROUP)


@cache
def file_of(choice: str) -> Path:
    """The config file of a choice."""
    return search_path.config_file(group_of(choice), choice)


@cache
def content(choice: str) -> DictConfig:
    """What a choice adds to the section `plugins`."""
    return OmegaConf.load(file_of(choice))


@dataclass
class Stack:
    """Methods put together."""

    composed: DictConfig
    config: Config
    active: Active
    notices: list[str]


def stack(choices: Sequence[str], options: dict[str, dict] | None = None, overrides: Sequence[str] = ()) -> Stack:
    """What a command line with these choices would run; UserError where it would be refused.

    options: plugin -> option -> value, beyond the choices' own; overrides: keys of the core, as on the command line.
    """
    chosen = {group: [name for name in choices if group_of(name) == group] for group in (GROUP, *BESIDE)}
    methods = chosen.pop(GROUP)
    plugins = [plugin for name in methods for plugin in content(name)]
    if len(plugins) > len(set(plugins)):
        search_path.check_choices([f"{GROUP}=[{','.join(methods)}]"])
    base, config = command_line(
        *(f"{group}=[{','.join(names)}]" for group, names in chosen.items() if names), *overrides
    )
    composed = base.copy()
    OmegaConf.set_struct(composed, False)
    composed.plugins = OmegaConf.merge(composed.plugins, *map(content, methods), options or {})
    config = replace(config, plugins=OmegaConf.to_container(composed.plugins, resolve=True))
    active = activate(composed.plugins, _found(), config.order)
    notices = [notice for notice in active.hooks.validate(config=config, active=active) if notice]
    return Stack(composed, config, active, notices)


@cache
def refusal(*choices: str) -> str | None:
    """The first line of why a stack is refused; None: it runs."""
    try:
        stack(choices)
    except UserError as error:
        return str(error).splitlines()[0]
    return None
