"""Long2Short: among right answers the shorter earns more (VibeThinker-3B, arXiv:2606.16140).

    C    = right completions of the group            by their verdicts, whatever else the rewards hold
    s_i  = 1 / L_i                                   L_i tokens, stop token included
    r'_i = r_i + coef (s_i - mean_C s) / max_C |s - mean_C s|        i in C; r otherwise, and if all lengths are equal

What it adds sums to zero over C: the mean of the group stays, and so does the advantage of every wrong completion
before it is divided by a standard deviation. It changes rewards only, before any advantage; a method that needs the
group's accuracy must take it from the verdicts, not from r'.
"""

from dataclasses import dataclass, replace

from grpozoo import Plugin, group_equal, group_index, group_mean, hookimpl


class Long2short(Plugin):
    """`algo=long2short`; stacks on any advantage."""

    order = 10
    metrics = {"shaped": "share of completions, 0 to 1: reward changed by its length"}

    @dataclass
    class Config:
        coef: float = 0.2  # the largest change of a reward in each group, at least 0; below 1 right stays above wrong

        def __post_init__(self):
            if self.coef < 0:
                raise ValueError(f"coef is at least 0, got {self.coef}")

    @hookimpl(wrapper=True)
    def transform_rewards(self, rollouts, rewards, run):
        rewards = yield
        group_id = rollouts.group_id
        right = (run.verdicts(rollouts, rewards) == 1) & ~rewards.total.isnan()  # [R] bool, C
        lengths = rollouts.lengths.double().clamp(min=1).masked_fill(~right, float("nan"))  # [R], NaN outside C
        s = 1 / lengths
        centred = s - group_mean(s, group_id)
        change = self.config.coef * centred / group_max(centred.abs(), group_id)
        change = change.masked_fill(~right | group_equal(lengths, group_id), 0.0)  # lengths are integers: no rounding
        self.log("shaped", (change != 0).double().mean(), len(rollouts))
        return replace(rewards, total=rewards.total + change)


def group_max(values, group_id):
    """[R]: the largest value in the row's group, NaN apart; values are at least 0."""
    index, groups = group_index(group_id)
    return values.new_zeros(groups).scatter_reduce(0, index, values.nan_to_num(0.0), "amax")[index]
