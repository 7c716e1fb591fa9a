"""Dr. GRPO: GRPO without its two divisions (Understanding R1-Zero-Like Training, arXiv:2503.20783, sec. 3).

    A_i  = r_i - mean(r_group)                    no division by the std: hard and easy prompts weigh alike
    loss = 1 / (B C) sum_i sum_t loss_it          C = max_completion_length: no division by the row's own length

Its gradient is (G - 1) / G times an unbiased one. A row without a reward leaves its group; equal rewards give exactly
0. It reads rewards alone and stacks on any per-token loss and weight; another aggregation is another owner.
"""

from grpozoo import Plugin, group_equal, group_mean, hookimpl


class DrGrpo(Plugin):
    """`algo=dr_grpo`."""

    @hookimpl
    def advantage(self, rollouts, rewards):
        centred = rewards.total - group_mean(rewards.total, rollouts.group_id)  # [R], NaN without a reward
        return centred.nan_to_num(0.0).masked_fill(group_equal(rewards.total, rollouts.group_id), 0.0)

    @hookimpl
    def aggregation(self):
        return "const_len"
