"""What a user reads when something was wrong: one short message instead of a library's page."""

import re
import sys

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import YAMLError

from grpozoo.compose import search_path
from grpozoo.compose.command import compose
from grpozoo.compose.registry import owner
from grpozoo.errors import UserError, nearest, shortened

EXPECTED = (UserError, OmegaConfBaseException, OSError, YAMLError)  # nobody's bug: a sentence, no traceback

TOOLS = {
    "warm-start": "train the starting weights of the tiny policy: grpozoo warm-start task=arithmetic task.level=3",
    "plugins": "list the installed plugins, broken ones with their error",
    "explain": "explain metrics | explain RUN_FOLDER | explain KEY=VALUE ...",
    "card": "what one method is: source, equations, options, needs, what it stacks with: grpozoo card NAME",
    "layer-scan": "train full and each layer alone, and compare: grpozoo layer-scan --seeds 0,1,2 steps=50",
    "check": "run the conformance kit over a plugin: grpozoo check NAME [CONFIG_CHOICE]",
}


def explain(error: Exception) -> str:
    """One short message: what was wrong, the nearest valid name, what to do."""
    return shortened(_explained(error))


def _explained(error: Exception) -> str:
    text = str(error).strip()
    if isinstance(error, UserError):
        return text
    if isinstance(error, YAMLError | UnicodeDecodeError):
        return _broken_file(error)
    if isinstance(error, InterpolationResolutionError) and "Recursive" in text:
        key = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        return f"{key}${{...}} leads back to itself, so it has no value\nwrite a value, or the key of another option"
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or text}\nrun_dir=FOLDER says where a run writes"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        available = search_path.choices(group) or sorted(error.options or ())
        if available:
            return f"unknown choice {group}={choice}{nearest(choice, available)}\navailable: {', '.join(available)}"
    if isinstance(error, OverrideParseException):
        tools = "" if "=" in error.override else f"{nearest(error.override, TOOLS)}\ntools: {', '.join(TOOLS)}"
        key, equals, value = error.override.partition("=")
        quoted = f"{key}='{value}'" if equals and "'" not in value else "KEY='VALUE'"
        return (
            f"cannot read the argument {error.override!r}{tools}\n"
            f'write KEY=VALUE; a value with a comma, # or another sign takes quotes for Hydra and for the shell: "{quoted}"'
        )
    if merging := re.match(r"Error merging override (.*)", text):
        return _unfit_value(merging[1])
    if isinstance(error, OmegaConfBaseException) and error.full_key and not _unknown_key(error):
        return f"{error.full_key}: {text.splitlines()[0]}"
    if "appears more than once in the final defaults list" in text:
        group = text.split()[0]
        return f"{group} is chosen already: write {group}=[a,b] for several, without +"
    key = _unknown_key(error)
    return (
        _explain_key(key)
        if key
        else "\n".join(line.strip() for line in text.splitlines()[:4] if line.strip()) or repr(error)
    )


def _broken_file(error: YAMLError | UnicodeDecodeError) -> str:
    """A config file that nobody's group brings (`--config-dir`): which, and where."""
    mark = getattr(error, "problem_mark", None)
    where = f"{mark.name}:{mark.line + 1}" if mark else "a config file"
    return f"{where} is no YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}"


def _unfit_value(override: str) -> str:
    """A value of another shape than the one that stands there: a list for a section, a choice of a sweep without -m."""
    key, _, value = override.partition("=")
    several = "; several values, one run for each, need the flag -m" if re.search(r",|\(", value) else ""
    return f"{key.lstrip('+~')} cannot be set to {value}: it has another form{several}\npython -m grpozoo --cfg job shows what stands there"


def _unknown_key(error: Exception) -> str | None:
    """The key of an override that fits nothing."""
    marks = (
        "Could not override '",
        "Could not delete from config. '",
        "Could not append to config. An item is already at '",
        "Key '",
    )
    for line in str(error).splitlines():
        for mark in marks:
            if line.startswith(mark):
                return line[len(mark) :].split("'")[0]
    return None


def _explain_key(key: str) -> str:
    keys = _all_keys()
    if key in keys and key not in search_path.groups():
        return f"{key} is there already: change it without + (python -m grpozoo {key}=VALUE)"
    section, _, option = key.removeprefix("plugins.").partition(".")
    options = [name.removeprefix(f"plugins.{section}.") for name in keys if name.startswith(f"plugins.{section}.")]
    if key.startswith("plugins.") and option and f"plugins.{section}" in keys:
        return (
            f"unknown key {key!r}: the plugin {section!r} (from {owner(section)}) has no option {option!r}{nearest(option, options)}\n"
            f"options: {', '.join(options) or 'none'}"
        )
    return (
        f"unknown key {key!r}{nearest(key, keys)}\n"
        f"python -m grpozoo --cfg job shows every key; groups: {', '.join(search_path.groups())}"
    )


def _all_keys() -> list[str]:
    """Groups and keys of the configuration that the command line chose, as far as it composes."""
    groups = search_path.groups()
    chosen = [argument for argument in sys.argv[1:] if argument.lstrip("+~").split("=")[0] in groups]
    flat: list[str] = groups

    def walk(prefix: str, value) -> None:
        flat.append(prefix)
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}.{key}", item)

    try:
        composed = compose(chosen)
    except HydraException:
        composed = compose([])
    for key, value in OmegaConf.to_container(composed).items():
        walk(str(key), value)
    return flat
