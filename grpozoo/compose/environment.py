"""Secrets stay where they are: what a run folder keeps of a configuration names environment variables, not their values.

A value that `${oc.env:NAME}` gives, directly or by way of another key, is written as that text; a password that stands in
a URL is refused; and a configuration that is read back from a run folder reads no variable that this command does not.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from grpozoo.errors import UserError

RESOLVER = "oc.env"
PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # scheme://user:password@host


def recorded(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration, as a run folder keeps it: what comes from the environment is the text that asks for it."""
    return _recorded(config)


def variables(config: DictConfig) -> dict[str, list[str]]:
    """Key of each value that reads the environment -> the variables. None of them is read."""
    found: dict[str, list[str]] = {}
    _recorded(config, "", lambda key, names: found.setdefault(key, names))
    return found


def check_passwords(config: DictConfig) -> None:
    """Refuse a password in a URL, which config.yaml and the manifest would keep."""
    for key, value in _texts("", recorded(config)):
        if PASSWORD.search(value):
            raise UserError(
                f"{key} holds a password, and the run folder would keep it\n"
                f"put the URL into an environment variable and write {key}='${{oc.env:NAME}}', with quotes for the shell"
            )


def check_consent(saved: DictConfig, composed: DictConfig) -> None:
    """Refuse a saved configuration that reads variables where this command line does not say so with the same words."""
    said = {key: raw(composed, key) for key in variables(composed)}
    for key, names in variables(saved).items():
        text = raw(saved, key)
        if said.get(key) != text:
            raise UserError(
                f"the saved configuration reads the environment variable {', '.join(names)} ({key})\n"
                f"if that is meant, say it again on this command line: {key}='{text}'"
            )


@contextmanager
def _asked() -> Iterator[list[str]]:
    """While it is open, variables are named and not read."""
    names: list[str] = []

    def ask(name: str, default: Any = None) -> str:
        names.append(str(name))
        raise KeyError(name)

    OmegaConf.register_new_resolver(RESOLVER, ask, replace=True)
    try:
        yield names
    finally:
        OmegaConf.register_new_resolver(RESOLVER, oc.env, replace=True)


def _recorded(node: Any, place: str = "", report: Callable[[str, list[str]], Any] = lambda key, names: None) -> Any:
    """`node` as plain lists and dictionaries; report(key, variables) of each value out of the environment."""
    if isinstance(node, ListConfig):
        keys = [(key, f"{place}[{key}]") for key in range(len(node))]
    else:
        keys = [(key, f"{place}.{key}" if place else str(key)) for key in node]
    plain = {}
    for key, where in keys:
        names = _names(node, key)
        if names:
            report(where, names)
            plain[key] = _text(node, key)
        elif OmegaConf.is_missing(node, key):
            plain[key] = "???"
        elif OmegaConf.is_config(value := node[key]):
            plain[key] = _recorded(value, where, report)
        else:
            plain[key] = _literal(value)
    return list(plain.values()) if isinstance(node, ListConfig) else plain


def _names(node: DictConfig | ListConfig, key: Any) -> list[str]:
    """The variables that one value asks for."""
    if not OmegaConf.is_interpolation(node, key):
        return []
    # suppressed: the refusal of `ask`, or a mistake that the reader of the value reports
    with _asked() as names, suppress(OmegaConfBaseException):
        _ = node[key]
    return names


def _text(node: DictConfig | ListConfig, key: Any) -> str:
    """A value as it is written."""
    return OmegaConf.to_container(node, resolve=False)[key]


def raw(config: DictConfig, key: str) -> str:
    """The value at a whole key as it is written."""
    value = OmegaConf.to_container(config, resolve=False)
    for part in re.findall(r"[^.\[\]]+", key):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def _literal(value: Any) -> Any:
    """A text that reads back as itself: what looks like an interpolation and is none."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value) if isinstance(value, str) else value


def _texts(place: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(f"{place}.{key}" if place else str(key), item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _texts(f"{place}[{number}]", item)
    elif isinstance(value, str):
        yield place, value
