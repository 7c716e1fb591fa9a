"""Checks of a plugin's surface: configuration, options, needs, metrics, state."""

import ast
import inspect
import io
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from omegaconf import DictConfig, OmegaConf

from grpozoo.calls.inputs import contents, differing
from grpozoo.compose.options import read_options
from grpozoo.compose.search_path import CONF, config_folders, defaults
from grpozoo.errors import UserError
from grpozoo.hooks import KINDS, NEEDS, Plugin
from grpozoo.run.plain import packed, unpacked
from grpozoo.testing.subject import Subject, claim


@cache
def _parsed(text: str) -> DictConfig:
    return OmegaConf.create(text)


def config_files(name: str) -> list[Path]:
    """The group files of all distributions that contribute options to `plugins.NAME`, the fullest first."""
    found = []
    for folder in (CONF, *config_folders().values()):
        for file in sorted(folder.rglob("*/*.yaml")):
            text = file.read_text(encoding="utf-8")
            if text.startswith("# @package plugins\n") and name in _parsed(text):
                found.append((len(_options(file, name)), file))
    return [file for _, file in sorted(found, key=lambda pair: (-pair[0], pair[1].stem != name, str(pair[1])))]


def overrides_for(name: str) -> list[str]:
    """The command line that switches a plugin on: its config file, or its name alone."""
    files = [file for file in config_files(name) if file.stem == name] or config_files(name)
    if not files:
        return [f"+plugins.{name}={{}}"]
    group = next(
        file.parent.relative_to(folder)
        for file in files[:1]
        for folder in (CONF, *config_folders().values())
        if folder in file.parents
    )
    return [f"{group}={files[0].stem}" if group.as_posix() in defaults() else f"+{group}={files[0].stem}"]


def _options(file: Path, name: str) -> dict:
    return OmegaConf.to_container(OmegaConf.load(file))[name] or {}


def check_composes(subject: Subject) -> None:
    """Composes, creates, registers, and passes its own validation."""
    live = subject.fresh()
    live.hooks.validate(config=subject.config, active=live.active)
    claim(subject.answers, f"it implements no hook; hooks are {', '.join(KINDS)}")


def check_yaml(subject: Subject) -> None:
    """The config file holds every key of Config at its default."""
    files = config_files(subject.name)
    claim(files, f"it has no config file: add GROUP/{subject.name}.yaml, which begins with '# @package plugins'")
    cls = type(subject.fresh().plugin)
    defaults = OmegaConf.to_container(OmegaConf.structured(cls.Config), enum_to_str=True)
    written = _options(files[0], subject.name)
    where = f"{files[0].parent.name}/{files[0].name}"
    missing, extra = sorted(defaults.keys() - written.keys()), sorted(written.keys() - defaults.keys())
    claim(not missing, f"{where} lacks {', '.join(missing)}")
    claim(not extra, f"{where} has {', '.join(extra)}, which Config lacks")
    for key, default in defaults.items():
        claim(written[key] == default, f"{where} says {key}={written[key]!r}, Config says {default!r}")
    for file in files:
        stray = sorted(_options(file, subject.name).keys() - defaults.keys())
        claim(not stray, f"{file.parent.name}/{file.name} has {', '.join(stray)}, which Config lacks")


def check_unknown_option(subject: Subject) -> None:
    """An option that Config lacks is refused."""
    cls = type(subject.fresh().plugin)
    try:
        read_options(subject.name, cls.Config, {"no_such_option": 1}, f"plugins.{subject.name}", "the kit")
    except UserError:
        return
    claim(False, "its Config accepts the option 'no_such_option'")


def check_options_are_read(subject: Subject) -> None:
    """Every option is read outside __post_init__."""
    cls = type(subject.fresh().plugin)
    names = {f.name for f in fields(cls.Config)}
    read: set[str] = set()
    for module in _modules(cls):
        read |= _reads(ast.parse(inspect.getsource(module)))
    read |= {"weight"} if "reward" in subject.answers else set()  # read by grpozoo.score
    unread = sorted(names - read) if "*" not in read else []
    claim(not unread, f"nothing reads the option {', '.join(unread)}")


def _modules(cls: type[Plugin]) -> set[ModuleType]:
    """The modules of the class and its bases, and those of the same package whose content they use."""
    own = {sys.modules[base.__module__] for base in cls.__mro__ if issubclass(base, Plugin) and base is not Plugin}
    package = cls.__module__.split(".")[0]
    used = {
        getattr(value, "__module__", None) or getattr(value, "__name__", "")
        for module in own
        for value in vars(module).values()
    }
    names = {str(name) for name in used if str(name).split(".")[0] == package}
    return own | {sys.modules[name] for name in names if name in sys.modules}


def _reads(tree: ast.AST) -> set[str]:
    """Attributes read, names given to getattr(), and "*" where a whole config is taken (asdict, vars)."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("asdict", "vars", "astuple"):
                found.add("*")
            if called in ("getattr", "attrgetter"):
                found |= {
                    arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                }
        if isinstance(node, ast.For | ast.comprehension) and "getattr" in ast.dump(tree):
            found |= {
                item.value
                for item in ast.walk(node.iter)
                if isinstance(item, ast.Constant) and isinstance(item.value, str)
            }
        found |= _reads(node)
    return found


def check_needs(subject: Subject) -> None:
    """Needs are a frozenset of known names, and a regularizer needs "all_rows"."""
    plugin = subject.fresh().plugin
    claim(isinstance(plugin.needs, frozenset), f"needs is a frozenset, got {type(plugin.needs).__name__}")
    claim(
        plugin.needs <= NEEDS, f"needs {', '.join(sorted(plugin.needs - NEEDS))}: known are {', '.join(sorted(NEEDS))}"
    )


def check_state(subject: Subject) -> None:
    """state_dict() is what a checkpoint can hold, survives a save, and load_state_dict() restores it with the behaviour."""
    with subject.live() as live:
        step = live.begin(subject.example())
        live.value_and_gradients(step)
        live.hooks.after_step(step=1, metrics={}, run=live.run)
        state = live.plugin.state_dict()
        claim(isinstance(state, dict), f"state_dict() returns a dict, got {type(state).__name__}")
        try:
            held = packed(state, "state_dict()")
        except UserError as error:
            return claim(False, str(error).replace("\n", "; "))
        buffer = io.BytesIO()
        torch.save(held, buffer)
        buffer.seek(0)
        loaded = unpacked(torch.load(buffer, weights_only=True))
        expected = contents(live.value_and_gradients(step))
    with subject.live() as other:
        for name, plugin in other.active.plugins.items():
            plugin.load_state_dict(loaded if name == subject.name else live.active.plugins[name].state_dict())
        path = differing(contents(loaded), contents(other.plugin.state_dict()))
        claim(path is None, f"state_dict(){path} differs after load_state_dict()")
        again = other.trim(subject.example())._replace(batch=step.batch)
        path = differing(expected, contents(other.value_and_gradients(again)))
        claim(path is None, "a restored plugin gives another loss: something that decides it is not in state_dict()")
    return None


def check_metrics(subject: Subject) -> None:
    """Everything logged is described as "unit: meaning"; runs last."""
    described = type(subject.fresh().plugin).metrics
    for name in sorted(subject.logged):
        owner, _, metric = name.partition("/")
        claim(owner == subject.name and metric in described, f"it logs {name!r} and does not describe it in `metrics`")
    for metric, text in described.items():
        claim(": " in text, f"metrics[{metric!r}] is 'unit: meaning', got {text!r}")
