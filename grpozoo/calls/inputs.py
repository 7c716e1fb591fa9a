"""What a hook was given, and whether it is still the same afterwards. Data flow between hooks: nobody changes them in place.

A tensor counts its changes, so a look at every tensor costs microseconds. What escapes the count (`.numpy()`, `.data`,
a prompt's `extra`) shows only in a copy of everything, which is taken for the first calls of each hook.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FIXED = (str, bytes, int, type(None))  # float apart: NaN does not equal itself


def versions(value: Any, path: str = "") -> Iterator[tuple[str, Tensor, int]]:
    """(path, tensor, how often it was changed) of every tensor in dataclasses, mappings and tuples of tensors."""
    if _is_tensor(value):
        yield path, value, version(value)
    elif _is_data(value):
        for f in fields(value):
            yield from versions(getattr(value, f.name), f"{path}.{f.name}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from versions(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple) and value and _is_tensor(value[0]):
        for index, item in enumerate(value):
            yield from versions(item, f"{path}[{index}]")


def version(tensor: Tensor) -> int:
    """How often the tensor or one that shares its memory was changed; those of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def contents(value: Any, path: str = "", seen: set[int] | None = None) -> dict[str, Any]:
    """Everything inside dataclasses, mappings and sequences: path -> detached copy of a tensor, or a plain value.

    An object that stands in several places (the prompt of a group's rows) is copied where it stands first.
    """
    seen = set() if seen is None else seen
    if _is_tensor(value):
        return {path: value.detach().clone()}
    if hasattr(value, "tobytes") and hasattr(value, "shape"):  # an array of numpy's
        return {path: (str(value.dtype), value.shape, value.tobytes())}
    if isinstance(value, Set):
        return {path: frozenset(value)}
    if _is_data(value):
        if id(value) in seen:
            return {}
        seen.add(id(value))
        items = ((f".{f.name}", getattr(value, f.name)) for f in fields(value))
    elif isinstance(value, Mapping):
        items = ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple) and not _fixed(value):
        items = ((f"[{index}]", item) for index, item in enumerate(value))
    else:
        return {path: value}
    return {path: type(value).__name__} | {
        key: item for name, part in items for key, item in contents(part, path + name, seen).items()
    }


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """The first path whose content is not bitwise what it was."""
    return next((path for path in before | after if not _same(before.get(path), after.get(path))), None)


def _same(a: Any, b: Any) -> bool:
    if _is_tensor(a) and _is_tensor(b):
        import torch

        return (
            a.shape == b.shape
            and a.dtype == b.dtype
            and torch.equal(a.isnan(), b.isnan())
            and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    if a is b or type(a) is not type(b):
        return a is b
    return bool(a == b) or (a != a and b != b)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "_version")


def _is_data(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _fixed(value: Any) -> bool:
    """Whether nobody can change it: a tuple of token ids, texts."""
    if isinstance(value, tuple):
        return all(map(_fixed, value))
    return isinstance(value, FIXED)
