"""Bad values for every option of the core, the tasks and the plugins: made from the schemas, a fixed sample of them."""

import re
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from hashlib import sha256
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from bad_inputs import GOOD, Case, put
from omegaconf import MISSING

from grpozoo.compose import search_path
from grpozoo.compose.registry import installed, load_class
from grpozoo.config import Config

TASKS = "grpozoo.tasks"
PLACES = ("algo", "sampler", "engine", "params", "reward")  # groups of plugins
FREE = ("run_dir", "resume", "plugins", "task")  # keys with cases of their own, or none
GIVEN = {"task.path": "{here}/d.jsonl", "plugins.function.path": "x.py:f", "task.name": "chain_sum"}
NEGATIVE = frozenset({  # options that have a meaning below zero
    "seed", "logger.completions", "plugins.layers.layer", "plugins.lora.seed", "plugins.layers.seed", "plugins.clip_cov.lower",
    "plugins.bnpo.reward_min", "plugins.multi_rlvr.empty_score", "plugins.vpo.empty_score", "task.seed",
})  # fmt: skip
WRONG = {  # type -> values that are none of it
    float: ("nan", "-inf", "text", "[1,2]", "{a:1}"),
    int: ("nan", "inf", "1.5", "text", "100000000000000000000", "[1,2]", "{a:1}"),
    bool: ("nan", "-1", "100", "text", "[true]", "{a:1}"),
    str: ("[a,b]", "{a:1}"),
    Enum: ("text", "nan", "-1", "[a,b]", "{a:1}"),
    list: ("nan", "-1", "text", "{a:1}"),
    dict: ("nan", "-1", "text", "[1,2]"),
}


@dataclass(frozen=True)
class Option:
    """One option of one schema."""

    choose: str | None  # GROUP=CHOICE that brings it; None: the core has it
    key: str
    kinds: tuple[type, ...]
    nullable: bool
    required: tuple[str, ...] = ()  # other keys of the schema that have no default

    def wrong(self) -> list[str]:
        """Values that are none of its types."""
        values = [set(WRONG[kind]) for kind in self.kinds]
        return sorted(set.intersection(*values)) + ["null"] * (not self.nullable)


def options() -> list[Option]:
    """All of them, the core's first."""
    sections = {name: kind for name, kind in get_type_hints(Config).items() if is_dataclass(kind)}
    found = [option for name, kind in sections.items() for option in _of(kind, None, f"{name}.")]
    found += [option for option in _of(Config, None, "") if option.key not in (*FREE, *sections)]
    for name in sorted(installed()):
        group = next((group for group in PLACES if name in search_path.choices(group)), None)
        found += _of(load_class(name).Config, group and f"{group}={name}", f"plugins.{name}.")
    for name in sorted(installed(TASKS)):
        found += _of(load_class(name, TASKS).Config, f"task={name}", "task.")
    return found


def sample(every: int) -> list[tuple[Option, str]]:
    """One in `every` pairs of option and wrong value, by hash: adding an option leaves the choice of the others."""
    pairs = [(option, value) for option in options() for value in option.wrong()]
    return [(option, value) for option, value in pairs if _number(option.choose, option.key, value) % every == 0]


def edges(every: int) -> list[tuple[Option, str]]:
    """Numbers of the right type that nobody means: -1 and a giant, but where they are legitimate."""
    numbers = [option for option in options() if set(option.kinds) & {int, float}]
    pairs = [(option, "-1") for option in numbers if option.key not in NEGATIVE and not option.key.endswith(".weight")]
    return [pair for pair in pairs if _number(pair[0].choose, pair[0].key) % every == 0]


def cases() -> list[Case]:
    """The sample, as commands."""
    return [_case(option, value) for option, value in (*sample(30), *edges(4))]


def _case(option: Option, value: str) -> Case:
    given = [f"{key}={GIVEN[key]}" for key in option.required if key in GIVEN]
    words = (*([option.choose] if option.choose else ()), *given, f"{option.key}={value}")
    name = option.key.rpartition(".")[2]
    return Case(f"option {option.key}={value}", words, re.escape(name), put("d.jsonl", GOOD))


def _of(schema: type, choose: str | None, prefix: str) -> list[Option]:
    hints = get_type_hints(schema)
    required = [prefix + f.name for f in fields(schema) if f.default == MISSING]
    found = []
    for f in fields(schema):
        kinds, nullable = _kinds(hints[f.name])
        if kinds:
            others = tuple(key for key in required if key != prefix + f.name)
            found.append(Option(choose, prefix + f.name, kinds, nullable, others))
    return found


def _kinds(hint: Any) -> tuple[tuple[type, ...], bool]:
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [get_origin(part) or part for part in parts if part is not type(None)]
    kinds = [Enum if isinstance(kind, type) and issubclass(kind, Enum) else kind for kind in kinds]
    return tuple(kind for kind in kinds if kind in WRONG), type(None) in parts


def _number(*words: Any) -> int:
    return int.from_bytes(sha256(repr(words).encode()).digest()[:4], "big")
