"""The law a token is drawn from, the choice of the token, and its log-probability: one implementation for both sides.

z      = logits / temperature                       kept set: top-k, then top-p, then min-p; all others -inf
p_v    = exp(z_v) / sum_kept exp(z)                 the sampling law; log p_v is what Rollouts.logprobs holds
pick   v with  F(v - 1) <= u < F(v),  F the cumulative sum of p in the order of the ids
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpozoo.config import check_temperature
from grpozoo.rng import stream
from grpozoo.types import Request

BLOCK = 256  # ids per block of the two-level search


@dataclass(frozen=True)
class Law:
    """Temperature and truncation. temperature = 0 is greedy: the likeliest token, the smallest id among equals."""

    temperature: float = 1.0
    top_k: int = 0  # tokens kept; 0 = all
    top_p: float = 1.0  # probability mass kept
    min_p: float = 0.0  # share of the likeliest token's probability

    def __post_init__(self):
        check_temperature("temperature", self.temperature)

    @property
    def truncates(self) -> bool:
        """Whether any token's probability is set to zero."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0

    def warp(self, logits: Tensor, keep: Tensor | None = None) -> Tensor:
        """Logits [n, V] -> [n, V] float32, scaled, -inf outside the kept set.

        `keep` [n]: token ids that stay whatever the truncation says. The trainer passes the sampled tokens: after an
        update one of them may have left the set, and its log-probability must stay finite.
        """
        scaled = logits.float() / (self.temperature or 1.0)
        return scaled.masked_fill(~self.kept(scaled.detach(), keep), -torch.inf) if self.truncates else scaled

    def kept(self, scaled: Tensor, keep: Tensor | None = None) -> Tensor:
        """[n, V] bool: the tokens that may be drawn. Ties at the edge of top-k and top-p go to the smaller id."""
        kept = torch.ones_like(scaled, dtype=torch.bool)
        if self.top_k or self.top_p < 1:
            order = scaled.sort(dim=-1, descending=True, stable=True)
            rank = torch.empty_like(order.indices).scatter_(
                -1, order.indices, torch.arange(scaled.shape[-1], device=scaled.device).expand_as(order.indices)
            )
            if self.top_k:
                kept &= rank < self.top_k
            if self.top_p < 1:
                values = order.values[:, : self.top_k] if self.top_k else order.values
                p = values.double().softmax(-1)
                count = ((p.cumsum(-1) - p) < self.top_p).sum(-1, keepdim=True)  # the token that crosses top_p stays
                kept &= rank < count
        if self.min_p:
            top = scaled.amax(-1, keepdim=True)
            kept &= scaled >= top + torch.tensor(self.min_p).log()
        return kept if keep is None else kept.scatter(-1, keep[:, None], True)


class Choice:
    """The law of the next token of n rows, ready to be inverted. Weights are unnormalised probabilities, float32."""

    def __init__(self, warped: Tensor):
        """warped: [n, V] float32 from `Law.warp`."""
        self.warped = warped
        top = warped.amax(-1, keepdim=True)
        weights = (warped - top).exp_()
        if pad := -weights.shape[-1] % BLOCK:
            weights = torch.nn.functional.pad(weights, (0, pad))
        self._blocks = weights.view(len(weights), -1, BLOCK)
        self._sums = self._blocks.sum(-1).double()  # [n, blocks]; float32 sums of 256 terms, good to 1e-7
        self._edges = self._sums.cumsum(-1)
        self.total = self._edges[:, -1]  # [n] float64, sum of the weights
        self._log_total = top[:, 0].double() + self.total.log()

    @property
    def broken(self) -> Tensor:
        """[n] bool: rows without a law, because logits are NaN, +inf, or all of them -inf."""
        return ~self._log_total.isfinite()

    @property
    def probabilities(self) -> Tensor:
        """[n, V] float64; costs a pass over the vocabulary."""
        flat = self._blocks.flatten(1)[:, : self.warped.shape[-1]].double()
        return flat / flat.sum(-1, keepdim=True)

    def logprobs(self, tokens: Tensor) -> Tensor:
        """[n] float32, nats."""
        return (self.warped.gather(-1, tokens[:, None])[:, 0].double() - self._log_total).float()

    def pick(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Coordinates u [n] float64 in [0, 1) -> token ids [n], lower edge and width [n] float64 of their bins.

        Two levels: the block whose interval holds u, then the token in it. The same token as a full scan finds.
        """
        rows = torch.arange(len(u), device=u.device)
        y = u * self.total
        block = torch.searchsorted(self._edges, y[:, None], right=True)[:, 0].minimum(_last(self._sums > 0))
        inside = self._sums[rows, block]
        low = self._edges[rows, block] - inside
        weights = self._blocks[rows, block].double()
        edges = weights.cumsum(-1)
        scale = inside / edges[:, -1]  # 1 to rounding: the bins of a block fill it exactly
        item = torch.searchsorted(edges, ((y - low) / scale)[:, None], right=True)[:, 0].minimum(_last(weights > 0))
        width = weights[rows, item]
        lower = low + (edges[rows, item] - width) * scale
        return block * BLOCK + item, lower / self.total, width * scale / self.total

    def pick_plain(self, u: Tensor) -> Tensor:
        """The plain twin of `pick`: one scan over the whole vocabulary."""
        p = self.probabilities
        edges = p.cumsum(-1)
        return torch.searchsorted(edges, (u * edges[:, -1])[:, None], right=True)[:, 0].minimum(_last(p > 0))


def _last(positive: Tensor) -> Tensor:
    """[n, m] bool -> [n] index of the last true entry."""
    return positive.shape[-1] - 1 - positive.flip(-1).byte().argmax(-1)


class TokenSampler:
    """Chooses tokens inside the decode loop. One object per call of the engine: `start`, then `next` for every token."""

    independent = True  # rows of a group are independent: every subset of them is a smaller sample

    def start(self, requests: list[Request], seed: int, step: int, max_tokens: int) -> None:
        """Rows are numbered in the order of the requests and, in each, of its sample_ids."""

    def next(self, choice: Choice, rows: Tensor, position: int) -> Tensor:
        """Token ids [n] for the given rows [n] (numbers from `start`), all at completion position `position`."""
        return choice.warped.argmax(-1)

    def design(self) -> dict[str, Tensor]:
        """name -> [rows]: what must stay with a rollout (Rollouts.design)."""
        return {}

    def sets(self, design: Mapping[str, Sequence[int]], count: int, m: int) -> list[list[list[int]]]:
        """Ways to take m of a prompt's `count` rows that are distributed like m rows sampled together; [] if there is none.

        A set is m cells; one row drawn from each cell, independently and uniformly, makes such a sample. Evaluation
        averages over all of it (pass@m). design: name -> [count], that of the prompt's rows. Asked only if the rows are
        not independent and 1 < m <= count; here the whole is the one known set.
        """
        return [[[row] for row in range(count)]] if m == count else []


class Greedy(TokenSampler):
    """The likeliest token; what evaluation and temperature = 0 use."""


def uniforms(seed: int, step: int, request: Request, sample: int, block: int, count: int):
    """`count` uniform float64 numbers in [0, 1) of one row's block of tokens, the same in every process."""
    key = (step, request.prompt.id, request.group_id, request.tag, request.policy, sample, block)
    return stream(seed, "tokens", *key).random(count)


def counted_uniform(key: Tensor, n: Tensor) -> Tensor:
    """The n-th number of each key, float64 in [0, 1): for numbers that rows draw at different times, all rows at once."""
    return (counted_bits(key, n) >> 10).double() * 2**-53


def counted_bits(key: Tensor, n: Tensor) -> Tensor:
    """63 random bits, int64: the n-th output, n >= 0, of SplitMix64 seeded by `key` (int64) without its lowest bit."""
    z = key + (n + 1) * -0x61C8864680B583EB  # int64 wraps around; the constants are those of the paper, minus 2^64
    z = (z ^ _right(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _right(z, 27)) * -0x6B2FB644ECCEEE15
    return _right(z ^ _right(z, 31), 1)


def _right(z: Tensor, bits: int) -> Tensor:
    """Shift to the right, zeros moving in."""
    return (z >> bits) & (2 ** (64 - bits) - 1)
