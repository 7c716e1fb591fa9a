"""Options of anything that declares them as a dataclass: merged, typed, checked."""

from functools import cache
from importlib.metadata import EntryPoint
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from grpozoo.compose.registry import owner_of
from grpozoo.errors import UserError, nearest


@cache
def _structured(schema: type) -> DictConfig:
    return OmegaConf.structured(schema)


def read_options(name: str, schema: type, options: Any, where: str, owner: str | EntryPoint = "grpozoo") -> Any:
    """Options merged into the dataclass `schema`: unknown keys, wrong types and missing values are UserErrors.

    owner: the distribution that a message names, or the entry point of the plugin.
    """
    try:
        merged = OmegaConf.merge(_structured(schema), options or {})
        if missing := sorted(OmegaConf.missing_keys(merged)):
            raise UserError(f"{where}.{missing[0]} has no value: set {where}.{missing[0]}=...")
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
        raise UserError(f"{where}{'.' + str(key) if key else ''}: {str(error).splitlines()[0]}") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}") from None
