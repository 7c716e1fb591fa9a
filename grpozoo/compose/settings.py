"""From a composed configuration to validated settings: everything that can be wrong is found before a model is loaded."""

import json
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import sha256
from importlib.metadata import version
from platform import python_version
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpozoo.calls.guard import place
from grpozoo.compose import environment
from grpozoo.compose.command import compose
from grpozoo.compose.options import read_options
from grpozoo.compose.plugins import Active, activate
from grpozoo.compose.registry import installed, source_hash
from grpozoo.compose.task import check_size, load_task
from grpozoo.config import Config, Schedule
from grpozoo.errors import UserError, unknown
from grpozoo.tasks import Task

FREE = ("resume", "resume_changed", "run_dir", "logger", "checkpoint")  # say where and when, not what
SECTIONS = {
    name: key.default_factory
    for name, key in Config.__dataclass_fields__.items()
    if isinstance(key.default_factory, type)
}
PACKAGES = ("grpozoo", "torch", "transformers", "accelerate", "hydra-core", "numpy")


@dataclass
class Settings:
    """What a run is built from."""

    config: Config
    active: Active
    task: Task
    composed: DictConfig
    notices: list[str] = field(default_factory=list)  # printed when the run starts

    def yaml(self) -> str:
        """The resolved configuration, every key; what comes from the environment stays the text that asks for it."""
        return OmegaConf.to_yaml(OmegaConf.create(self.record()))

    def record(self) -> dict[str, Any]:
        """The same as plain dictionaries and lists."""
        return environment.recorded(self.composed)

    def manifest(self) -> dict[str, Any]:
        """Plugins with versions and hashes, hooks in order of application, seed, data, package versions."""
        return self._manifest

    @cached_property
    def _manifest(self) -> dict[str, Any]:
        """As things were when the run started: a file that is edited meanwhile is not what runs."""
        data = {"kind": self.config.task["kind"], "fingerprint": self._fingerprint()}
        return self.active.manifest() | {
            "config_hash": fingerprint(self.composed),
            "seed": self.config.seed,
            "data": data | {"sha256": source_hash(type(self.task))},
            "versions": {"python": python_version(), **{name: version(name) for name in PACKAGES}},
        }

    def _fingerprint(self) -> str:
        """The task's, which is somebody's code."""
        try:
            return self.task.fingerprint()
        except UserError:
            raise
        except Exception as error:
            kind = self.config.task["kind"]
            raise UserError(f"task.{kind}: fingerprint() raised {error!r:.300}\nat {place(error)}") from error


def read(composed: DictConfig) -> Settings:
    """Check names first (no imports), then options, ranges, contradictions, and the data."""
    _check_sections(composed)
    environment.check_passwords(composed)
    known = installed()
    for name in composed.plugins:
        if name not in known:
            raise unknown("plugin", name, known)
    config = read_core(composed)
    active = activate(composed.plugins, known, config.order)
    notices = [notice for notice in active.hooks.validate(config=config, active=active) if notice]
    task = load_task(config.task)
    check_size(task, config.prompts_per_step)
    return Settings(config, active, task, composed, [*notices, *task.notices])


@cache
def command_line(*overrides: str) -> tuple[DictConfig, Config]:
    """What a command line composes and the core's keys of it. Asked for once and kept: copy before you change either."""
    composed = compose(list(overrides))
    return composed, read_core(composed)


def read_core(composed: DictConfig) -> Config:
    """The core's keys with their types and ranges."""
    _check_sections(composed)
    schemas = {name: SECTIONS[name] for name in SECTIONS if name in composed}
    sections = {name: read_options(name, schema, composed[name], name) for name, schema in schemas.items()}
    rest = {name: value for name, value in composed.items() if name not in sections and name not in ("plugins", "task")}
    config = read_options("grpozoo", Config, {**rest, "plugins": {}, "task": {}}, "")
    for name, section in sections.items():
        setattr(config, name, section)
    config.plugins = OmegaConf.to_container(composed.plugins, resolve=True)
    config.task = OmegaConf.to_container(composed.task, resolve=True)
    config.check()
    return config


def _check_sections(composed: DictConfig) -> None:
    """The sections are those of Config, and each is one."""
    known = set(Config.__dataclass_fields__)
    for name in composed:
        if name not in known:
            raise UserError(
                f"{unknown('section', name, known)}\n(a config file of a plugin starts with the line '# @package plugins')"
            )
    for name in ("plugins", "task", *(name for name in SECTIONS if name in composed)):
        section = composed.get(name)
        if not isinstance(section, DictConfig):
            raise UserError(
                f"{name} is a section, got {'null' if section is None else section}\n"
                f"set its keys, {name}.KEY=VALUE; python -m grpozoo --cfg job shows them"
            )


# Keys that earlier versions lacked, at what they meant then: their runs resume
LATER = {
    "update.prefix_cache": True,
    "task.padding": 0.0,
    "task.scaffold_share": 0.0,
    "task.slips": 0.0,
    "task.prefill": "drop",
    "model.special_tokens_in_data": False,  # the same ids, except where data hold some: a notice says so
}


def comparable(composed: DictConfig) -> dict[str, Any]:
    """Flat key -> value of what decides the weights of a run."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), item)
        else:
            flat[prefix] = value

    walk("", {key: value for key, value in environment.recorded(composed).items() if key not in FREE})
    if str(composed.optim.schedule) == Schedule.constant.name:
        flat.pop("steps", None)  # a longer run begins like a shorter one
    return {key: value for key, value in flat.items() if key not in LATER or value != LATER[key]}


def fingerprint(composed: DictConfig) -> str:
    """Hash of `comparable`: two runs with the same hash train the same way."""
    return sha256(json.dumps(comparable(composed), sort_keys=True, default=str).encode()).hexdigest()[:16]
