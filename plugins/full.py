"""Full training: every parameter of the policy has a gradient and an optimizer state."""

from grpozoo import Plugin, hookimpl


class Full(Plugin):
    """`params=full`."""

    @hookimpl
    def select_parameters(self, policy):
        policy.model.requires_grad_(True)
        return [{"params": list(policy.model.parameters())}]
