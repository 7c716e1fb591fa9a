"""Process supervision (DeepSeekMath, arXiv:2402.03300, sec. 4.1.3): every step of a completion has its own reward.

    z_ij = (r_ij - mean(r)) / (std(r) + eps)       mean and std over the rewards of all steps of all rows of the group
    A_it = sum of z_ij over the steps j of completion i that end at token t or after it

The step rewards are a vector answer of a reward plugin, one matrix [steps, 2] for each row: (index of the step's last
token in the completion, reward). A row without steps, or without a total reward, leaves the statistics and has A = 0.
Equal step rewards in a group give exactly 0. It replaces the advantage and reads no totals, so a reward for the answer
stands beside it for selection and metrics: `reward=[answer,steps]`. What shapes totals (long2short) would do nothing.
"""

from dataclasses import dataclass

import torch

from grpozoo import Plugin, UserError, group_equal, group_mean, group_std, hookimpl


class Process(Plugin):
    """`algo=process reward=[answer,steps]`."""

    conflicts = {"long2short": "process reads the rewards of steps, long2short changes totals: it would have no effect"}

    @dataclass
    class Config:
        component: str | None = None  # name of the vector reward; null: the only one
        ddof: int = 1  # 1: unbiased std; 0: population std
        eps: float = 1e-4  # added to the std

        def __post_init__(self):
            if self.ddof not in (0, 1):
                raise ValueError(f"ddof is 0 or 1, got {self.ddof}")
            if not self.eps >= 0:
                raise ValueError(f"eps is at least 0, got {self.eps}")

    @hookimpl
    def advantage(self, rollouts, rewards):
        row, end, r = self.steps(rollouts, rewards)  # [S] each
        group = rollouts.group_id[row]
        z = (r - group_mean(r, group)) / (group_std(r, group, self.config.ddof) + self.config.eps)
        z = z.nan_to_num(0.0).masked_fill(group_equal(r, group), 0.0)
        at_end = z.new_zeros(rollouts.completion_mask.shape).index_put((row, end), z, accumulate=True)  # [R, T]
        return at_end.flip(1).cumsum(1).flip(1)

    def steps(self, rollouts, rewards):
        """Row, last token and reward of every step of the batch: [S] int64, [S] int64, [S] float64."""
        name = self.vector(rewards)
        rows, lines = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, 2, dtype=torch.float64)]
        for row, matrix in enumerate(rewards.vectors[name]):
            if matrix.numel() == 0 or bool(matrix.isnan().all()) or bool(rewards.total[row].isnan()):
                continue
            if matrix.shape[1] != 2:
                raise UserError(
                    f"plugins.{self.name}: a step is (index of its last token, reward), reward {name!r} has {matrix.shape[1]} columns"
                )
            rows.append(torch.full((len(matrix),), row))
            lines.append(matrix)
        row, (end, r) = torch.cat(rows), torch.cat(lines).T
        self.check(name, row, end, r, rollouts)
        return row, end.long(), r

    def vector(self, rewards):
        """Name of the vector reward."""
        names = sorted(rewards.vectors)
        name = self.config.component if self.config.component or len(names) != 1 else names[0]
        if name not in rewards.vectors:
            known = ", ".join(names) or "none, add one: reward=[answer,steps]"
            raise UserError(
                f"plugins.{self.name}.component={'null' if name is None else name}: rewards of steps are {known}"
            )
        if not rewards.components:
            raise UserError(
                f"plugins.{self.name}: no reward gives a number per completion, and rows without one are not trained on\n"
                f"add one: reward=[answer,{name}]"
            )
        return name

    def check(self, name, row, end, r, rollouts):
        """Every step ends at a token of its completion and has a reward."""
        width = rollouts.completion_mask.shape[1]
        inside = (end == end.round()) & (end >= 0) & (end < width)  # NaN is not inside
        inside[inside.clone()] = rollouts.completion_mask[row[inside], end[inside].long()]
        if bad := (~inside | r.isnan()).nonzero()[:, 0].tolist():
            at = bad[0]
            raise UserError(
                f"plugins.{self.name}: reward {name!r} has the step ({float(end[at]):g}, {float(r[at]):g}) in a completion of "
                f"{int(rollouts.lengths[row[at]])} tokens, prompt {rollouts.prompts[int(row[at])].id!r}"
            )
