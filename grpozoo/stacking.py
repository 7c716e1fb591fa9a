"""Which methods stack: every pair of choices of the group `algo`, put together as the command line would, without a model."""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint

from omegaconf import DictConfig, OmegaConf

from grpozoo import search_path
from grpozoo.errors import UserError
from grpozoo.plugins import Active, activate, installed
from grpozoo.settings import read_core

GROUP = "algo"


@cache
def _base() -> DictConfig:
    from grpozoo.cli.main import compose

    return compose([])


@cache
def _found() -> dict[str, EntryPoint]:
    return installed()


@cache
def default() -> str:
    """The choice of the configuration's own list of defaults."""
    lines = OmegaConf.load(search_path.CONF / "config.yaml").defaults
    return next(line[GROUP] for line in lines if not isinstance(line, str) and GROUP in line)


@cache
def content(choice: str) -> DictConfig:
    """What a choice of the group adds to the section `plugins`."""
    folders = (search_path.CONF, *search_path.config_folders().values())
    return OmegaConf.load(next(file for folder in folders if (file := folder / GROUP / f"{choice}.yaml").is_file()))


def stack(choices: Sequence[str], changes: dict | None = None) -> tuple[DictConfig, Active, list[str]]:
    """The composed configuration, the plugins and their notices; UserError where a run would be refused.

    changes: further keys to set, as nested dictionaries.
    """
    search_path.check_choices([f"{GROUP}=[{','.join(choices)}]"] if len(choices) > 1 else [])
    composed = _base().copy()
    OmegaConf.set_struct(composed, False)
    composed.plugins = OmegaConf.merge(composed.plugins, *map(content, choices))
    composed = OmegaConf.merge(composed, changes or {})
    config = read_core(composed)
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
