"""grpozoo: a zoo of group-relative policy optimisation. The public names, and nothing else; importing it does not import torch."""

from grpozoo import moved
from grpozoo.errors import UserError
from grpozoo.hooks import HOOK_VERSION, Plugin, hookimpl, may_be_infinite
from grpozoo.ops import (
    aggregate,
    clip_surrogate,
    group_equal,
    group_index,
    group_mean,
    group_std,
    importance_ratio,
    kl_estimate,
    masked_mean,
    masked_sum,
    top_k_mask,
    whiten,
)
from grpozoo.types import Batch, Output, Prompt, Request, Rewards, Rollouts, concatenate

moved.install()
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
    "clip_surrogate",
    "concatenate",
    "group_equal",
    "group_index",
    "group_mean",
    "group_std",
    "hookimpl",
    "importance_ratio",
    "kl_estimate",
    "masked_mean",
    "masked_sum",
    "may_be_infinite",
    "top_k_mask",
    "whiten",
]
