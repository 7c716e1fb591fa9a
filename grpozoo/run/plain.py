"""What a checkpoint can hold: values that are read back without running code, each as what it was.

    packed(value, where)    value -> None, numbers, text, tensors; lists, tuples and dictionaries of them
    unpacked(value)         the inverse: an equal value of the same type

A type that torch does not read with weights_only is written as {"grpozoo.type": its form, "value": what it is made of}.
Classes of somebody's own (an Enum, a dataclass) have no form: to build one from its name would run code, and a bare
number in its place would be something else. They are refused while the run can still say where they came from.
"""

import datetime
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import is_dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cache
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import torch

from grpozoo.errors import UserError

TAG = "grpozoo.type"
DEPTH = 64  # levels of nesting; a value that contains itself has more than any
ATOMS = (type(None), bool, int, float, str)
TENSORS = (torch.Tensor, torch.nn.Parameter)
NUMPY_KINDS = "biufcmMSU"  # what bytes alone describe; not objects and records
ALLOWED = "numbers, text, dates, tensors, numpy's numbers and arrays, and lists, tuples, dicts, sets and deques of them"


class Form(NamedTuple):
    """How a type is written and read; what `write` returns is packed in its turn."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _array(array: np.ndarray) -> list:
    content = np.frombuffer(array.tobytes(), dtype=np.uint8).copy()
    return [array.dtype.str, list(array.shape), torch.from_numpy(content)]


def _array_back(parts: list) -> np.ndarray:
    dtype, shape, content = parts
    return np.frombuffer(content.numpy().tobytes(), dtype=dtype).reshape(shape).copy()


def _torch_name(value: torch.dtype | torch.device) -> str:
    return str(value).removeprefix("torch.")


FORMS: dict[type, Form] = {
    dict: Form(lambda value: [list(pair) for pair in value.items()], dict),  # whose keys are more than text and numbers
    OrderedDict: Form(lambda value: [list(pair) for pair in value.items()], OrderedDict),
    Counter: Form(lambda value: [list(pair) for pair in value.items()], lambda pairs: Counter(dict(pairs))),
    set: Form(lambda value: sorted(value, key=repr), set),
    frozenset: Form(lambda value: sorted(value, key=repr), frozenset),
    deque: Form(lambda value: [list(value), value.maxlen], lambda parts: deque(*parts)),
    int: Form(hex, lambda digits: int(digits, 16)),  # of more digits than torch reads
    bytes: Form(lambda value: value.decode("latin-1"), lambda text: text.encode("latin-1")),
    bytearray: Form(lambda value: value.decode("latin-1"), lambda text: bytearray(text.encode("latin-1"))),
    complex: Form(lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    range: Form(lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    Decimal: Form(str, Decimal),
    Fraction: Form(lambda value: [value.numerator, value.denominator], lambda parts: Fraction(*parts)),
    UUID: Form(str, UUID),
    datetime.date: Form(datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: Form(datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.datetime: Form(datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.timedelta: Form(
        lambda value: [value.days, value.seconds, value.microseconds], lambda parts: datetime.timedelta(*parts)
    ),
    **{kind: Form(str, Path) for kind in (PosixPath, WindowsPath)},
    **{kind: Form(str, kind) for kind in (PurePosixPath, PureWindowsPath)},
    np.ndarray: Form(_array, _array_back),
    np.generic: Form(lambda value: _array(np.asarray(value)), lambda parts: _array_back(parts)[()]),
    torch.Size: Form(list, torch.Size),
    torch.dtype: Form(_torch_name, lambda name: getattr(torch, name)),
    torch.device: Form(_torch_name, torch.device),
}


def packed(value: Any, where: str, otherwise: Callable[[Any], Any] | None = None, depth: int = 0) -> Any:
    """`value` as a checkpoint holds it; `where` names it in the UserError for what has no form.

    otherwise: makes something else of a value without a form, instead of the error.
    """
    kind = type(value)
    if depth > DEPTH:
        raise UserError(
            f"{where[:200]}: nested deeper than {DEPTH} levels, or a value that contains itself\na checkpoint holds trees"
        )
    if kind in TENSORS or (kind in ATOMS and not (kind is int and value.bit_length() > 1024)):
        return value
    if kind in (list, tuple):
        return kind(packed(item, f"{where}[{n}]", otherwise, depth + 1) for n, item in enumerate(value))
    if kind is dict and TAG not in value and all(type(key) in ATOMS for key in value):
        return {key: packed(item, f"{where}[{key!r}]", otherwise, depth + 1) for key, item in value.items()}
    form = _form(value)
    if form is not None:
        return {TAG: _name(form), "value": packed(FORMS[form].write(value), where, otherwise, depth + 1)}
    if otherwise is not None:
        return packed(otherwise(value), where, otherwise, depth + 1)
    raise UserError(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: {_advice(value)}\n"
        f"allowed: {ALLOWED}"
    )


def unpacked(value: Any) -> Any:
    """The inverse of `packed`; what was saved before there were forms is as it was."""
    if type(value) in (list, tuple):
        return type(value)(unpacked(item) for item in value)
    if type(value) is not dict:
        return value
    if TAG in value:
        return _named()[value[TAG]].read(unpacked(value["value"]))
    return {key: unpacked(item) for key, item in value.items()}


def _form(value: Any) -> type | None:
    """The key of FORMS that writes this value without loss."""
    kind = type(value)
    if isinstance(value, np.generic | np.ndarray):
        kind = np.generic if isinstance(value, np.generic) else kind
        return kind if kind in FORMS and value.dtype.kind in NUMPY_KINDS else None
    zone = getattr(value, "tzinfo", None)
    return kind if kind in FORMS and isinstance(zone, datetime.timezone | None) else None  # a zone's rules have no form


def _name(kind: type) -> str:
    """As a checkpoint names a form; not where today's Python or numpy keeps the class."""
    return kind.__name__ if kind.__module__ != "numpy" else f"numpy.{kind.__name__}"


@cache
def _named() -> dict[str, Form]:
    return {_name(kind): form for kind, form in FORMS.items()}


def _advice(value: Any) -> str:
    """What the author of a plugin can save instead."""
    if isinstance(value, Enum):
        return "save its .name"
    if is_dataclass(value):
        return "save dataclasses.asdict(...)"
    if isinstance(value, defaultdict | dict):
        return "save dict(...)"
    if isinstance(value, tuple | list):
        return f"save {'tuple' if isinstance(value, tuple) else 'list'}(...)"
    if isinstance(value, np.random.Generator | np.random.RandomState | torch.Generator):
        return "draw from run.stream(NAME), which has no state"
    return "save what it is made of, and build it again in load_state_dict()"
