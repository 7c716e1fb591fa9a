"""Options of anything that declares them as a dataclass: merged, typed, checked."""

import math
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

from omegaconf import BooleanNode, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from grpozoo.calls.guard import place
from grpozoo.compose.registry import owner_of
from grpozoo.errors import UserError, nearest

BITS = 2**63  # torch's and numpy's integers end here


@cache
def _structured(schema: type) -> DictConfig:
    return OmegaConf.structured(schema)


def read_options(name: str, schema: type, options: Any, where: str, owner: str | EntryPoint = "grpozoo") -> Any:
    """Options merged into the dataclass `schema`: unknown keys, wrong types and missing values are UserErrors.

    owner: the distribution that a message names, or the entry point of the plugin.
    """
    options = {} if options is None else options  # `NAME:` in a YAML file: its defaults
    if not isinstance(options, Mapping | DictConfig):
        raise UserError(f"{where} is a section of options, got {options!r}")
    try:
        _check_switches(_structured(schema), options, where)
        merged = OmegaConf.merge(_structured(schema), options)
        if missing := sorted(OmegaConf.missing_keys(merged)):
            key = _place(where, missing[0])
            raise UserError(f"{key} has no value: set {key}=...")
        check_numbers(merged, where)
        return OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        keys = list(schema.__dataclass_fields__)
        key = str(getattr(error, "key", None) or error).split(".")[-1]
        source = owner if isinstance(owner, str) else owner_of(owner)
        raise UserError(
            f"{where}: {name!r} (from {source}) has no option {key!r}{nearest(key, keys)}\noptions: {', '.join(keys) or 'none'}"
        ) from None
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        if not key and (key := _unfit(schema, options)):
            raise UserError(
                f"{_place(where, key)}: a value of this form has no place here, got {options[key]}"
            ) from None
        raise UserError(f"{_place(where, key) if key else where}: {str(error).splitlines()[0]}") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{where}: {error}" if where else str(error)) from None
    except UserError:
        raise
    except Exception as error:  # the range checks of a schema are somebody's code
        raise UserError(f"{where}: {schema.__qualname__} raised {error!r:.300}\nat {place(error)}") from error


def _unfit(schema: type, options: Mapping | DictConfig) -> str | None:
    """The first option that does not merge: where OmegaConf meets a list for a section it does not say which."""
    for key in options:
        try:
            OmegaConf.merge(_structured(schema), {key: options[key]})
        except OmegaConfBaseException:
            return str(key)
    return None


def _place(where: str, key: Any) -> str:
    """The whole key of an option; the core's everyday keys stand at the top level, where="" there."""
    return f"{where}.{key}" if where else str(key)


def _check_switches(schema: DictConfig, options: Mapping | DictConfig, where: str) -> None:
    """OmegaConf takes every whole number for a switch that is on: -1 and 100 are mistakes."""
    for key in options:
        if key in schema and isinstance(schema._get_node(key), BooleanNode):
            value = options[key]
            if isinstance(value, int) and value not in (0, 1):
                raise UserError(f"{_place(where, key)} is true or false, got {value}")


def check_numbers(node: DictConfig | ListConfig, where: str) -> None:
    """Refuse NaN and infinity, which pass every range check of the form `x < 0`: also in lists, dictionaries and sections.

    Infinity is a value of the fields made with `may_be_infinite` alone, NaN of none. Whole numbers fit 64 bits.
    """
    fields = getattr(OmegaConf.get_type(node), "__dataclass_fields__", {})
    keys = range(len(node)) if isinstance(node, ListConfig) else list(node)
    for key in keys:
        value = node[key]
        spot = f"{where}[{key}]" if isinstance(node, ListConfig) else _place(where, key)
        if isinstance(value, DictConfig | ListConfig):
            check_numbers(value, spot)
        elif isinstance(value, int) and key in fields and not -BITS <= value < BITS:
            raise UserError(f"{spot} is a whole number of 64 bits, -2**63 to 2**63 - 1, got {value}")
        elif isinstance(value, float) and not math.isfinite(value):
            unbounded = key in fields and not fields[key].metadata.get("finite", True)
            if not unbounded or math.isnan(value):
                raise UserError(f"{spot} is a {'number' if unbounded else 'finite number'}, got {value}")
