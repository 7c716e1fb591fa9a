"""Which methods stack: every pair of methods, put together as the command line would, without a model."""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from grpozoo import search_path
from grpozoo.config import Config
from grpozoo.errors import UserError
from grpozoo.plugins import Active, activate, installed
from grpozoo.settings import read_core

GROUP = "algo"
BESIDE = ("sampler", "params")  # groups whose choices are methods too, one at a time


@cache
def _base(*overrides: str) -> DictConfig:
    from grpozoo.cli.main import compose

    return compose(list(overrides))


@cache
def _core(*overrides: str) -> Config:
    return read_core(_base(*overrides))


@cache
def _found() -> dict[str, EntryPoint]:
    return installed()


@cache
def defaults() -> dict[str, str]:
    """Group -> choice, of the configuration's own list of defaults."""
    lines = OmegaConf.load(search_path.CONF / "config.yaml").defaults
    return {group: choice for line in lines if not isinstance(line, str) for group, choice in line.items()}


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


def stack(choices: Sequence[str], changes: dict | None = None) -> tuple[DictConfig, Active, list[str]]:
    """The composed configuration, the plugins and their notices; UserError where a run would be refused.

    changes: further keys to set, as nested dictionaries.
    """
    chosen = {group: [name for name in choices if group_of(name) == group] for group in (GROUP, *BESIDE)}
    methods = chosen.pop(GROUP)
    plugins = [plugin for name in methods for plugin in content(name)]
    if len(plugins) > len(set(plugins)):
        search_path.check_choices([f"{GROUP}=[{','.join(methods)}]"])
    overrides = tuple(f"{group}=[{','.join(names)}]" for group, names in chosen.items() if names)
    composed = _base(*overrides).copy()
    OmegaConf.set_struct(composed, False)
    composed.plugins = OmegaConf.merge(composed.plugins, *map(content, methods))
    composed = OmegaConf.merge(composed, changes) if changes else composed
    config = read_core(composed) if changes else _core(*overrides)
    active = activate(composed.plugins, _found(), config.order)
    return composed, active, [notice for notice in active.hooks.validate(config=config, active=active) if notice]


@cache
def refusal(*choices: str) -> str | None:
    """The first line of why a stack is refused; None: it runs."""
    try:
        stack(choices)
    except UserError as error:
        return str(error).splitlines()[0]
    return None
