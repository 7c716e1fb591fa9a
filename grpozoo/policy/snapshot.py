"""The policy with earlier values of what trains: a reference or an old policy without a second model."""

from collections.abc import Iterable
from contextlib import contextmanager

import torch
from torch import Tensor

from grpozoo.policy.policy import Policy
from grpozoo.types import Output, Rollouts


class Snapshot:
    """The policy as it was when this was made: the trained parameters' values of then, put in place for each forward.

    It shares everything else with the policy, the kept states of frozen blocks too.
    """

    def __init__(self, policy: Policy, parameters: Iterable[Tensor]):
        """parameters: those that train, now or with other values later."""
        chosen = {id(parameter) for parameter in parameters}
        self.policy = policy
        self.live = {name: value for name, value in policy.model.named_parameters() if id(value) in chosen}
        self.kept = {name: value.detach().clone() for name, value in self.live.items()}

    @property
    def model(self) -> "Snapshot":
        """Where to ask for `named_parameters()`."""
        return self

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.policy.device

    def named_parameters(self):
        """The values that differ from the policy's, in place."""
        return self.kept.items()

    def parameters(self):
        """The same without names."""
        return self.kept.values()

    @contextmanager
    def in_place(self):
        """The policy has the snapshot's values while this lasts. Not inside a pass that takes gradients."""
        mine = {name: value.data for name, value in self.live.items()}
        for name, value in self.live.items():
            value.data = self.kept[name]
        try:
            yield self.policy
        finally:
            for name, value in self.live.items():
                value.data = mine[name]

    @torch.no_grad()
    def output(self, rollouts: Rollouts, entropy: bool = False, shared_prefix: bool = True) -> Output:
        """As Policy.output, without gradient."""
        with self.in_place() as policy:
            return policy.output(rollouts, entropy, shared_prefix)

    @torch.no_grad()
    def mix(self, other: Policy, share: float) -> None:
        """Move towards a policy with the same parameters: kept <- share * other + (1 - share) * kept."""
        new = dict(other.model.named_parameters())
        for name, value in self.kept.items():
            value.lerp_(new[name].detach().to(value), share)
