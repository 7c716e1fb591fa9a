"""grpozoo: a zoo of group-relative policy optimisation. The public names, and nothing else; importing it does not import torch."""

from grpozoo.errors import UserError
from grpozoo.hooks import HOOK_VERSION, Plugin, hookimpl
from grpozoo.ops import (
    aggregate,
    group_equal,
    group_mean,
    group_std,
    masked_mean,
    masked_sum,
)
from grpozoo.types import Batch, Output, Prompt, Request, Rewards, Rollouts

__version__ = "0.1.0"
__all__ = [
    "HOOK_VERSION",
    "Batch",
    "Output",
    "Plugin",
    "Prompt",
    "Request",
    "Rewards",
    "Rollouts",
    "UserError",
    "aggregate",
    "group_equal",
    "group_mean",
    "group_std",
    "hookimpl",
    "masked_mean",
    "masked_sum",
]
