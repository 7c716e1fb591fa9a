"""Multi-RLVR: several answers in a completion under the fixed scalar reward, VPO's control (arXiv:2605.22817).

    M_g [m, d]   rewards of the m answers in completion g;  w* the weights of the scalar reward, 1/d each
    R_g          = max_i w* . M_gi        or  sum_i w* . M_gi;  empty_score if there is no answer in g

It has VPO's prompts and answers and differs in the weights alone, so max is the cleaner control. The sum is what the
authors released; repeats count there unless `distinct`, which keeps one of each score vector as they do. Answers in
tags that several rewards score have those rewards' weights as w*.

R replaces the total of the rewards: it stacks on any advantage, loss and weight, but not on what reads the components.
"""

from dataclasses import dataclass
from enum import Enum

from grpozoo.rewards.answers import SetReward, scalar

Reduce = Enum("Reduce", ["max", "sum"])


class MultiRlvr(SetReward):
    """`algo=multi_rlvr`."""

    conflicts = {
        "gdpo": "gdpo reads reward components, and multi_rlvr changes the total",
        "process": "process reads the rewards of steps, and multi_rlvr changes the total",
        "random_weighting": "both reduce a completion's answers to its reward",
    }

    @dataclass
    class Config:
        answers: int = 3  # m, that a completion is asked for
        reduce: Reduce = Reduce.max  # max | sum, over the answers; released: sum
        distinct: bool = False  # equal score vectors of a completion count once; released: true
        empty_score: float = 0.0  # reward of a completion without answers; below the worst where rewards are negative
        component: str | None = None  # name of the vector reward; null: the only one, or the rewards of tagged answers
        instruction: str | None = (
            None  # added to prompts of tasks without a form of their own, {answers} is m; null: tags
        )

        def __post_init__(self):
            if self.answers < 1:
                raise ValueError(f"answers is at least 1, got {self.answers}")

    def reduce(self, sets, target, stream):
        scores = [scalar(M.unique(dim=0) if self.config.distinct else M, target) for M in sets]  # [m] each
        return [float(r.sum() if self.config.reduce is Reduce.sum else r.max()) for r in scores]
