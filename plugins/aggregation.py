"""Aggregation as a part of its own: how per-token losses become one number, whatever the surrogate is.

    seq_mean    1/R sum_i 1/L_i sum_t l_it       every completion counts the same (GRPO, arXiv:2402.03300)
    token_mean  1/N sum_i sum_t l_it             every token counts the same (DAPO, arXiv:2503.14476, sec. 3.3)
    const_len   1/(R C) sum_i sum_t l_it         the same without a random denominator (Dr. GRPO, arXiv:2503.20783)
    seq_sum     1/R sum_i sum_t l_it             the loss of a sequence is the sum of its tokens'
    token_sum   sum_i sum_t l_it

R completions and N tokens are those of the whole optimizer step, C is max_completion_length. It is what
`plugins.grpo.aggregation` sets, as a plugin: a recipe can name it among its parts and `~plugins.aggregation` takes it
out. It stacks on every advantage and surrogate that does not bring an aggregation itself.
"""

from dataclasses import dataclass
from enum import Enum

from grpozoo import Plugin, hookimpl

How = Enum("How", ["seq_mean", "token_mean", "const_len", "seq_sum", "token_sum"])


class Aggregation(Plugin):
    """`algo=aggregation plugins.aggregation.how=const_len`."""

    @dataclass
    class Config:
        how: How = How.token_mean  # seq_mean | token_mean | const_len | seq_sum | token_sum

    @hookimpl
    def aggregation(self):
        return self.config.how.name
