"""What is installed: entry points of plugins and tasks, and the distributions that bring them."""

import inspect
import traceback
from hashlib import sha256
from importlib.metadata import EntryPoint, entry_points

from grpozoo.errors import UserError, unknown

GROUP = "grpozoo"


def installed(group: str = GROUP) -> dict[str, EntryPoint]:
    """Entry-point name -> entry point. Two distributions with one name are refused: which of them would run?"""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = found.setdefault(entry.name, entry)
        if other is not entry and (other.value, _distribution(other)) != (entry.value, _distribution(entry)):
            raise UserError(
                f"{owner_of(other)} and {owner_of(entry)} both bring a {group} plugin named {entry.name!r}: uninstall one"
            )
    return found


def load_class(name: str, group: str = GROUP, found: dict[str, EntryPoint] | None = None) -> type:
    """The class behind an entry point; unknown names and broken modules are UserErrors. found: `installed(group)`."""
    kind, found = "plugin" if group == GROUP else "task", installed(group) if found is None else found
    if name not in found:
        raise unknown(kind, name, found)
    entry = found[name]
    try:
        return entry.load()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a module that calls sys.exit() would end the program in silence
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{kind} {name!r} ({entry.value}, from {owner_of(entry)}) does not import: {error!r}\nat {where.filename}:{where.lineno}"
        ) from None


def owner(name: str, group: str = GROUP) -> str:
    """Name and version of the distribution that brings a plugin."""
    return owner_of(installed(group)[name])


def owner_of(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"


def source_hash(cls: type) -> str:
    """SHA-256 of the module that defines a class: what it computes is a part of what a run is."""
    return sha256(inspect.getsource(inspect.getmodule(cls)).encode()).hexdigest()


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else ""
