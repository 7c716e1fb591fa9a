"""Everything that a checkpoint says it can hold comes back as what it was, and everything else is refused by name."""

import datetime
import io
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis.extra import numpy as arrays

from grpozoo import Plugin, Prompt, Rewards, Rollouts, UserError
from grpozoo.cycle import Cycle
from grpozoo.run.plain import DEPTH, TAG, packed, unpacked
from grpozoo.run.state import pack_cycle, plugin_states, unpack_cycle


def through_a_file(value):
    buffer = io.BytesIO()
    torch.save(packed(value, "state_dict()"), buffer)
    buffer.seek(0)
    return unpacked(torch.load(buffer, weights_only=True))


def same(a, b):
    """Equal, of one type, all the way down; NaN is NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict | OrderedDict | Counter):
        return len(a) == len(b) and all(same(*pair) for pair in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b)) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return a == b


KINDS = [
    np.bool_,
    np.int8,
    np.int64,
    np.uint16,
    np.float16,
    np.float32,
    np.float64,
    np.complex128,
    "M8[s]",
    "m8[D]",
    "U5",
    "S3",
]
ZONES = some.none() | some.just(datetime.UTC) | some.just(datetime.timezone(datetime.timedelta(hours=5, minutes=30)))
KEYS = some.text() | some.integers() | some.dates() | some.tuples(some.integers(), some.text()) | some.booleans()
LEAVES = some.one_of(
    some.none(), some.booleans(), some.integers(), some.integers(min_value=2**1000), some.floats(), some.binary(),
    some.text(some.characters()), some.complex_numbers(allow_nan=False), some.decimals(allow_nan=False), some.fractions(),
    some.dates(), some.times(), some.datetimes(timezones=ZONES), some.timedeltas(), some.uuids(),
    some.sets(KEYS), some.frozensets(KEYS), some.binary().map(bytearray), some.text("ab/.", max_size=9).map(Path),
    some.sampled_from(KINDS).map(np.dtype).flatmap(lambda kind: arrays.arrays(kind, arrays.array_shapes(min_dims=0, min_side=0))),
    some.sampled_from(KINDS).map(np.dtype).flatmap(arrays.from_dtype),
    some.lists(some.floats(width=32)).map(torch.tensor), some.just(torch.Size([2, 3])), some.just(torch.bfloat16),
    some.sampled_from([range(3), Counter("aab"), torch.device("cpu"), TAG, {TAG: "set", "value": [1]}]),
)  # fmt: skip
TREES = some.recursive(
    LEAVES,
    lambda inner: some.lists(inner) | some.dictionaries(KEYS, inner) | some.tuples(inner, inner)
    | some.lists(inner).map(lambda items: deque(items, maxlen=9)) | some.dictionaries(some.text(), inner).map(OrderedDict),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_what_a_checkpoint_holds_comes_back_as_what_it_was(value):
    assert same(through_a_file(value), value)


class Mode(Enum):
    fast = 1


@dataclass
class Window:
    size: int = 3


Point = namedtuple("Point", "x y")
ENDLESS = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Mode.fast, "save its .name"),
        (Window(), r"save dataclasses.asdict\(...\)"),
        (Point(1, 2), r"save tuple\(...\)"),
        (defaultdict(list), r"save dict\(...\)"),
        (np.random.default_rng(0), "run.stream"),
        (np.array([object()]), "ndarray.*save what it is made of"),
        (np.zeros(2, dtype=[("a", "i4")]), "ndarray.*save what it is made of"),
        (object(), "builtins.object.*save what it is made of"),
        (lambda: 1, "builtins.function"),
        (ENDLESS, f"nested deeper than {DEPTH} levels, or a value that contains itself"),
    ],
)
def test_what_it_cannot_hold_is_refused_by_plugin_and_key(value, advice):
    class Mine(Plugin):
        def state_dict(self):
            return {"step": 1, "seen": {"last": [value]}}

    with pytest.raises(UserError, match=advice) as refused:
        plugin_states({"mine": Mine(None)})
    assert str(refused.value).startswith("plugin 'mine': state_dict()['seen']['last'][0]")


def test_a_state_that_is_no_dict_is_refused():
    class Mine(Plugin):
        def state_dict(self):
            return [1]

    with pytest.raises(UserError, match="plugin 'mine': state_dict.* returns a dict, got list"):
        plugin_states({"mine": Mine(None)})


def test_a_batch_holds_whatever_its_prompts_carry():
    """Values of known types as they are; of others what they are made of or their text, because data are not refused late."""
    known = {
        "n": np.float64(1.5),
        "a": np.arange(3),
        "d": datetime.date(2026, 1, 2),
        "x": Decimal("0.1"),
        "t": (1, [None]),
    }
    prompt = Prompt(
        "p",
        "1+1=",
        extra={**known, "point": Point(1, 2), "mode": Mode.fast, "counts": defaultdict(int, a=1), "w": Window()},
    )
    row = torch.ones(1, 1)
    rollouts = Rollouts(
        (prompt,), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), ((1,),), row.long(), row.bool(), row,
        ("stop",), (np.str_("2"),), ("train",), ("policy",),
    )  # fmt: skip
    cycle = Cycle(rollouts, Rewards({"answer": row[0]}, {"answer": np.float32(1)}, total=row[0]), row, [[0]])
    buffer = io.BytesIO()
    torch.save(pack_cycle(cycle), buffer)
    buffer.seek(0)
    again = unpack_cycle(unpacked(torch.load(buffer, weights_only=True)))
    extra = dict(again.rollouts.prompts[0].extra)
    assert same(extra, {**known, "point": [1, 2], "mode": "Mode.fast", "counts": {"a": 1}, "w": {"size": 3}})
    assert again.rollouts.text == ("2",) and again.rewards.weights == {"answer": 1.0}


def test_plain_values_are_written_as_they_are():
    """A checkpoint of the former format reads, and a later one of plain values is read by whatever reads torch's files."""
    state = {"coef": 0.5, "seen": [1, (2, "a")], "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}}
    assert packed(state, "state") == state and unpacked(state) == state
    assert UUID(int=1) == unpacked(packed(UUID(int=1), "id")) and Fraction(1, 3) == unpacked(
        packed(Fraction(1, 3), "x")
    )
