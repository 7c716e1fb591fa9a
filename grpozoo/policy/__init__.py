"""From token ids to log-probabilities of the sampling law."""

from grpozoo.policy.kv import left_pad, select_rows
from grpozoo.policy.policy import Policy
from grpozoo.policy.snapshot import Snapshot

__all__ = ["Policy", "Snapshot", "left_pad", "select_rows"]
