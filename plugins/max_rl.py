"""MaxRL: the advantage of maximum likelihood (arXiv:2602.02710).

    u   = mean(r_group)
    A_i = (r_i - u) / (u + eps)          0 where u = 0

For rewards 0 and 1 a group weighs 1 / u, as in the gradient of log p(right) where REINFORCE has that of p(right): rare
successes weigh most. It is defined for rewards >= 0: a negative total would flip or blow up the quotient, so it is
refused (a penalty, `overlong` or a KL in the reward, does not go with it). A row without a reward leaves its group;
equal rewards give exactly 0. It reads rewards alone and stacks on any loss, weight and aggregation.
"""

from dataclasses import dataclass

from grpozoo import Plugin, UserError, group_equal, group_mean, hookimpl


class MaxRl(Plugin):
    """`algo=max_rl`."""

    conflicts = {"overlong": "its punishment makes rewards negative, and max_rl divides by their mean"}

    @dataclass
    class Config:
        eps: float = 1e-6  # added to the mean, in units of the reward, at least 0

        def __post_init__(self):
            if self.eps < 0:
                raise ValueError(f"eps is at least 0, got {self.eps}")

    @hookimpl
    def advantage(self, rollouts, rewards):
        total, group_id = rewards.total, rollouts.group_id  # [R] float64
        if bool((total < 0).any()):
            row = int((total < 0).nonzero()[0])
            raise UserError(
                f"{self.name} divides by the mean reward and needs rewards of at least 0: prompt {rollouts.prompts[row].id!r}, "
                f"sample {int(rollouts.sample_id[row])} has {total[row].item():g}\ndrop the penalty, or use algo=dr_grpo"
            )
        u = group_mean(total, group_id)  # [R]
        A = (total - u) / (u + self.config.eps)
        return A.nan_to_num(0.0).masked_fill(group_equal(total, group_id), 0.0)
