"""REINFORCE (Williams 1992), the loss that GPG (arXiv:2504.02546) returns to: no ratio, no clip.

    loss = -A logp        per token; its gradient is -A

On-policy it has the gradient of every ratio surrogate at w = 1. With several updates per batch the completions are no
longer those of the policy that is updated, and nothing corrects for that.
A is read token by token: it stacks on every advantage and every token weight. Aggregation is the run's
(plugins.grpo.aggregation). The loss is no objective: only its gradient has a meaning.
"""

from grpozoo import Plugin, hookimpl


class Reinforce(Plugin):
    """`algo=reinforce`, also known as GPG."""

    @hookimpl
    def validate(self, config):
        updates = config.update.per_batch
        if updates > 1:
            return (
                f"plugins.{self.name} has no importance ratio: of {updates} updates per batch all but the first are "
                "biased; use update.mini_batches=1 update.epochs=1, or a surrogate with a ratio (algo=cispo)"
            )

    @hookimpl
    def policy_loss(self, batch, out):
        return -batch.advantages * out.logprobs  # [r, T]
