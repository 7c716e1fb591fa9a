"""Independent sampling: every token of every completion is drawn with a uniform number of its own.

    u_{i,t} ~ U[0, 1) from the stream (seed, step, prompt, group, sample i),  token = F^{-1}(u_{i,t})

F is the cumulative law of the next token (temperature, top-k, top-p and min-p applied). The numbers depend on what
is sampled and not on where or with whom, so they are the same for any number of processes.
"""

import numpy as np
import torch

from grpozoo import Plugin, hookimpl
from grpozoo.sampling import TokenSampler, uniforms

BLOCK = 64  # tokens for which numbers are drawn at once


class Independent(TokenSampler):
    """One stream per row, drawn in blocks so that long completions do not hold all numbers at once."""

    def start(self, requests, seed, step, max_tokens):
        self.rows = [(request, sample) for request in requests for sample in request.sample_ids]
        self.key, self.size = (seed, step), min(BLOCK, max_tokens)
        self.numbers = torch.zeros(len(self.rows), self.size, dtype=torch.float64)  # of each row's current block
        self.blocks = torch.full((len(self.rows),), -1)

    def next(self, choice, rows, position):
        block, offset = divmod(position, self.size)
        if stale := rows[self.blocks[rows] != block].tolist():
            drawn = [uniforms(*self.key, *self.rows[row], block, self.size) for row in stale]
            self.numbers[stale] = torch.from_numpy(np.stack(drawn))
            self.blocks[stale] = block
        return choice.pick(self.numbers[rows, offset].to(choice.warped.device))[0]


class Iid(Plugin):
    """`sampler=iid`."""

    @hookimpl
    def token_sampler(self):
        return Independent()
