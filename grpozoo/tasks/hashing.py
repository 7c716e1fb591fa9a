"""Stable hashes: the same in every process, on every machine and in every version of Python."""

from collections.abc import Iterable
from hashlib import blake2b


def stable_int(*parts: object) -> int:
    """A number in [0, 2^64) that depends on the printed parts only; ("ab", "c") and ("a", "bc") differ."""
    return int.from_bytes(blake2b(_joined(parts), digest_size=8).digest(), "big")


def stable_hex(*parts: object) -> str:
    """The same as 16 hexadecimal digits."""
    return blake2b(_joined(parts), digest_size=8).hexdigest()


def unit(*parts: object) -> float:
    """The same as a number in [0, 1)."""
    return (stable_int(*parts) >> 11) * 2.0**-53


def digest(items: Iterable[str]) -> str:
    """32 hexadecimal digits over a sequence of strings, in order."""
    state = blake2b(digest_size=16)
    for item in items:
        state.update(item.encode("utf-8", "surrogatepass"))
        state.update(b"\x1e")  # two different sequences never concatenate to the same bytes
    return state.hexdigest()


def _joined(parts: tuple[object, ...]) -> bytes:
    return "\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")
