"""Numbers that no range check of the form `x < 0` refuses: NaN and infinity, in every option that anybody declares."""

import math
from dataclasses import dataclass, field, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from omegaconf import MISSING

from grpozoo import UserError, may_be_infinite
from grpozoo.compose.options import read_options
from grpozoo.compose.registry import installed, load_class
from grpozoo.config import Config

TASKS = "grpozoo.tasks"
UNBOUNDED = {("qmc", "refresh_bits"), ("two_sided", "delta")}  # infinity: never, and no cap


def takes_float(kind):
    return kind is float or (get_origin(kind) in (Union, UnionType) and float in get_args(kind))


def floats(schema):
    """(option, what it takes: a float, or a list of them) of a dataclass."""
    for name, kind in get_type_hints(schema).items():
        inner = [part for part in (kind, *get_args(kind)) if get_origin(part) is list]
        if takes_float(kind):
            yield name, False
        elif inner and any(takes_float(item) for item in get_args(inner[0])):
            yield name, True


def declared():
    """Every float option: (owner, schema, option, whether it is a list)."""
    sections = {name: kind for name, kind in get_type_hints(Config).items() if is_dataclass(kind)}
    schemas = {"core": Config, **sections}
    schemas |= {name: load_class(name).Config for name in installed()}
    schemas |= {f"task {name}": load_class(name, TASKS).Config for name in installed(TASKS)}
    return [(owner, schema, *option) for owner, schema in schemas.items() for option in floats(schema)]


DECLARED = declared()


def test_the_search_finds_the_options_that_it_is_about():
    found = {(owner, option) for owner, _, option, _ in DECLARED}
    assert found >= {
        ("core", "lr"),
        ("optim", "betas"),
        ("grpo", "clip_high"),
        ("layers", "scale"),
        ("task jsonl", "heldout"),
    }
    assert len(found) > 100 and found > UNBOUNDED


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_float_option_is_finite_unless_its_field_says_otherwise(value):
    for owner, schema, option, many in DECLARED:
        if (owner, option) in UNBOUNDED and value == math.inf:
            assert getattr(read_options(owner, schema, {option: value}, "here"), option) == math.inf
            continue
        place = f"here.{option}{'[0]' if many else ''}"
        required = [name for name, part in schema.__dataclass_fields__.items() if part.default == MISSING]
        given = {name: {} if schema is Config else "x" for name in required}
        with pytest.raises(UserError) as error:
            read_options(owner, schema, {**given, option: [value, 0.5] if many else value}, "here")
        message = str(error.value)
        owned = (owner, option) in UNBOUNDED and value == -math.inf  # the plugin's own range says it
        assert owned or message.startswith(place), (owner, option, message)
        assert message.endswith(f"got {value}"), (owner, option, message)


@dataclass
class Inner:
    """A section in a section."""

    share: float = 0.5


@dataclass
class Outer:
    """A float in every place where a schema can put one."""

    inner: Inner = field(default_factory=Inner)
    several: list[Inner] = field(default_factory=list)
    table: dict[str, float] = field(default_factory=dict)
    free: Any = None
    rows: list[list[float]] = field(default_factory=list)
    cap: float = may_be_infinite(2.0)


@pytest.mark.parametrize("options, place", [
    ({"inner": {"share": math.nan}}, r"plugins\.x\.inner\.share is a finite number, got nan"),
    ({"several": [{}, {"share": math.inf}]}, r"plugins\.x\.several\[1\]\.share is a finite number, got inf"),
    ({"table": {"a": -math.inf}}, r"plugins\.x\.table\.a is a finite number, got -inf"),
    ({"free": {"a": [1, math.nan]}}, r"plugins\.x\.free\.a\[1\] is a finite number, got nan"),
    ({"rows": [[1.0], [2.0, math.inf]]}, r"plugins\.x\.rows\[1\]\[1\] is a finite number, got inf"),
    ({"cap": math.nan}, r"plugins\.x\.cap is a number, got nan"),
])  # fmt: skip
def test_a_float_is_finite_wherever_the_schema_puts_it(options, place):
    with pytest.raises(UserError, match=place):
        read_options("x", Outer, options, "plugins.x")


def test_infinity_arrives_where_the_field_has_a_meaning_for_it():
    assert read_options("x", Outer, {"cap": "inf"}, "plugins.x").cap == math.inf


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30])
def test_a_whole_number_fits_the_64_bits_of_torch_and_numpy(value):
    with pytest.raises(UserError, match=rf"^seed is a whole number of 64 bits, .* got {value}$"):
        read_options("grpozoo", Config, {"seed": value, "plugins": {}, "task": {}}, "")
    assert read_options("grpozoo", Config, {"seed": 2**63 - 1, "plugins": {}, "task": {}}, "").seed == 2**63 - 1
