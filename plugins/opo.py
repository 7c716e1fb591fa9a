"""OPO: the optimal baseline of on-policy REINFORCE (arXiv:2505.23585).

    b   = sum_j L_j r_j / sum_j L_j          over the group; L tokens of a completion, stop token included
    A_i = r_i - b                            sum_i L_i A_i = 0

The baseline of least variance weighs rewards by the squared norm of each row's gradient. If tokens contribute
orthogonal gradients of one size, that norm goes with L: true of the sum over tokens (aggregation token_mean, const_len,
seq_sum) and one update per batch. A row without a reward leaves its group; a group without tokens has no baseline and
advantage 0, and equal rewards give exactly 0. It reads rewards and lengths and stacks on any loss and weight.
"""

from grpozoo import Plugin, group_equal, group_mean, hookimpl


class Opo(Plugin):
    """`algo=opo`."""

    @hookimpl
    def validate(self, config):
        updates = config.update.per_batch
        if updates > 1:
            return f"{self.name}: its baseline is optimal on-policy; update.mini_batches * update.epochs is {updates}, not 1"
        return None

    @hookimpl
    def advantage(self, rollouts, rewards):
        total, group_id = rewards.total, rollouts.group_id  # [R] float64
        L = rollouts.lengths.double().masked_fill(total.isnan(), float("nan"))
        b = group_mean(L * total, group_id) / group_mean(L, group_id)  # [R]; 0 / 0 in a group without tokens
        return (total - b).nan_to_num(0.0).masked_fill(group_equal(total, group_id), 0.0)
