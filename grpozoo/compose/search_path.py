"""Where Hydra finds config files: our `conf/`, then those that installed distributions announce."""

from collections import defaultdict
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml import YAMLError

from grpozoo.errors import UserError

HERE = Path(__file__).resolve().parents[1]  # the package grpozoo
CONF = next(folder for folder in (HERE / "conf", HERE.parent / "conf") if folder.is_dir())  # wheel, checkout


PLUGINS = "# @package plugins"  # first line of a file that adds to the section `plugins`


def config_folder(entry) -> Path | None:
    """The folder that 'their_package.conf' names, found without importing it."""
    package, *rest = entry.value.split(".")
    spec = find_spec(package)
    roots = (spec.submodule_search_locations or []) if spec else []
    return next((folder for root in roots if (folder := Path(root, *rest)).is_dir()), None)


def config_folders() -> dict[str, Path]:
    """Distribution -> config folder, for every distribution that has the entry point `grpozoo.conf`."""
    folders = {}
    for entry in sorted(entry_points(group="grpozoo.conf"), key=lambda entry: entry.name):
        if folder := config_folder(entry):
            folders[entry.dist.name] = folder
    return folders


class InstalledConfigs(SearchPathPlugin):
    """Appends the folders of installed distributions, so that `algo=theirs` works after `pip install theirs`."""

    def manipulate_search_path(self, search_path):
        """Called by Hydra."""
        for distribution, folder in config_folders().items():
            search_path.append(provider=distribution, path=f"file://{folder}")


def check_installation() -> None:
    """Refuse a checkout whose plugins are missing or are those of another, installed copy."""
    checkout = HERE.parent / "plugins"
    if CONF.parent == HERE or not checkout.is_dir():
        return
    spec = find_spec("grpozoo_plugins")
    places = {Path(place).resolve() for place in (spec.submodule_search_locations or [])} if spec else set()
    if checkout not in places:
        found = f"its plugins come from {', '.join(map(str, sorted(places)))}" if places else "it is not installed"
        raise UserError(
            f"grpozoo runs from the checkout {HERE.parent}, but {found}\npip install -e {HERE.parent}, or run it from another folder"
        )


def register() -> None:
    """Make Hydra use the folders; refuse two files with the same group and name (Hydra would take the first)."""
    check_installation()
    owners = defaultdict(list)
    for distribution, folder in {"grpozoo": CONF, **config_folders()}.items():
        for file in folder.rglob("*.yaml"):
            owners[str(file.relative_to(folder).with_suffix(""))].append(distribution)
    for name, distributions in owners.items():
        if len(distributions) > 1:
            raise UserError(
                f"{' and '.join(distributions)} both bring the config file {name}.yaml\nuninstall one, or ask its author to rename it"
            )
    if InstalledConfigs not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(InstalledConfigs)


def choices(group: str) -> list[str]:
    """The config names of a group, of every distribution."""
    return sorted(
        {file.stem for folder in (CONF, *config_folders().values()) for file in (folder / group).glob("*.yaml")}
    )


def config_file(group: str, name: str) -> Path | None:
    """The file of a choice, ours or that of another distribution."""
    folders = (CONF, *config_folders().values())
    return next((file for folder in folders if (file := folder / group / f"{name}.yaml").is_file()), None)


@cache
def defaults() -> dict[str, str | None]:
    """Group -> choice, of the configuration's own list of defaults."""
    lines = OmegaConf.load(CONF / "config.yaml").defaults
    pairs = [pair for line in lines if not isinstance(line, str) for pair in line.items()]
    return {str(group): choice for group, choice in pairs if not str(group).startswith("override ")}


def groups() -> list[str]:
    """The names of all config groups."""
    return sorted(
        {
            str(file.parent.relative_to(folder))
            for folder in (CONF, *config_folders().values())
            for file in folder.rglob("*/*.yaml")
        }
    )


def check_file(group: str, name: str) -> None:
    """Refuse a choice whose file Hydra cannot read, naming the file and the distribution that brings it."""
    if (file := config_file(group, name)) is None:
        return
    fault = _fault(file)
    if fault:
        owners = {folder: f" (from {owner})" for owner, folder in config_folders().items()}
        source = next((owner for folder, owner in owners.items() if folder in file.parents), "")
        raise UserError(f"{group}={name}: {file}{source}: {fault}\nmend the file, or ask its author")


def _fault(file: Path) -> str | None:
    """What is wrong with a config file of a group; None: nothing."""
    try:
        text = file.read_text(encoding="utf-8")
        content = OmegaConf.create(text)
    except UnicodeDecodeError as error:
        return f"it is not UTF-8: {error.reason} at byte {error.start}"
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        return f"it is no YAML: {getattr(error, 'problem', None) or error}" + (
            f" (line {mark.line + 1})" if mark else ""
        )
    first = text.partition("\n")[0]
    if "@package" in first and len(first.split()) != 3:
        return f"its first line is {first!r}, not '# @package plugins'"
    if not isinstance(content, DictConfig):
        return "it is no mapping of keys to values"
    if "defaults" in content and not isinstance(content.defaults, ListConfig):
        return "its defaults are no list"
    if first == PLUGINS:
        plain = OmegaConf.to_container(content)
        strange = [
            name for name, options in plain.items() if not isinstance(options, dict | None) and name != "defaults"
        ]
        return f"{strange[0]} is a plugin with its options, got {plain[strange[0]]!r}" if strange else None
    return None


def check_choices(overrides: list[str]) -> None:
    """Refuse two choices of one group, as in `algo=[a,b]`, that give one option two values: the later would win in silence.

    An option that is set by an override of its own is decided there.
    """
    chosen = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    for group in groups():
        names = chosen.get(group, "").strip("[]").split(",")
        if len(names) < 2:
            continue
        origin: dict[str, tuple[str, Any]] = {}
        for name in (name.strip() for name in names):
            for key, value in _options(group, name).items():
                other, before = origin.setdefault(key, (name, value))
                if before != value and key not in chosen:
                    raise UserError(
                        f"{group}={other} sets {key}={before} and {group}={name} sets {key}={value}\n"
                        f"choose one of them, or say which value it is: {key}=..."
                    )


def _options(group: str, name: str) -> dict[str, Any]:
    """The options that a choice sets in the section `plugins`: key -> value."""
    file = config_file(group, name)
    if file is None or not file.read_text(encoding="utf-8").startswith(PLUGINS):
        return {}
    content = OmegaConf.to_container(OmegaConf.load(file)) or {}
    return {
        f"plugins.{plugin}.{key}": value
        for plugin, options in content.items()
        for key, value in (options or {}).items()
    }
