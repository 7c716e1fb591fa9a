"""Errors that are addressed to the user: where, what, what is allowed. No traceback, exit status 1."""

from collections.abc import Iterable
from difflib import get_close_matches

from hydra.errors import CompactHydraException

PIECE, LINE = 400, 3000  # characters


def shortened(text: str) -> str:
    """A message in which no value fills the screen: between commas at most PIECE characters, LINE in a line."""

    def cut(part: str, limit: int) -> str:
        return part if len(part) <= limit else f"{part[: limit // 2]}... ({len(part)} characters) ...{part[-40:]}"

    lines = text.splitlines()
    return "\n".join(cut(", ".join(cut(piece, PIECE) for piece in line.split(", ")), LINE) for line in lines)


SHOWN = 80  # choices that a message lists, the nearest ones of more


class UserError(CompactHydraException):
    """A mistake in a command, a configuration or a data file. Raise it `from None`."""

    def __init__(self, message: object = ""):
        super().__init__(shortened(str(message)))


def nearest(name: str, choices: Iterable[str]) -> str:
    """`, did you mean 'x'?` where a choice is close to `name`; empty otherwise."""
    close = get_close_matches(str(name), [str(choice) for choice in choices], n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else ""


def unknown(what: str, name: str, choices: Iterable[str]) -> UserError:
    """The error for a name that is not among `choices`, with the nearest one and the whole list."""
    choices = sorted(str(choice) for choice in choices)
    shown = [choice for choice in choices if choice in get_close_matches(str(name), choices, SHOWN, 0)]
    more = f" and {len(choices) - len(shown)} more" if len(shown) < len(choices) else ""
    return UserError(f"unknown {what} {name!r}{nearest(name, choices)}\navailable: {', '.join(shown) or 'none'}{more}")
