"""Reductions over tokens, rows and groups: pure functions on tensors. Every mean names what it divides by."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS = ("seq_mean", "token_mean", "const_len", "seq_sum", "token_sum")
EQUAL = 1e-8  # rewards closer than this, relative to their size, are equal


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask`; what stands elsewhere (inf, NaN) has no effect, on the gradient either."""
    kept = values.masked_fill(~mask, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` over the tokens in `mask`; 0 where there are none."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def denominators(mask: Tensor, const_len: int) -> dict[str, float]:
    """What each aggregation divides by, counted over all rows [R, T] of an optimizer step, empty rows included."""
    rows, tokens = len(mask), int(mask.sum())
    return {
        "seq_mean": max(rows, 1),
        "token_mean": max(tokens, 1),
        "const_len": max(rows, 1) * const_len,
        "seq_sum": max(rows, 1),
        "token_sum": 1,
    }


def aggregate(losses: Tensor, mask: Tensor, how: str, denominator: float) -> Tensor:
    """Losses [r, T] or [r, 1] of some rows -> their share of the step's scalar loss.

    seq_mean    sum_i (1 / L_i) sum_t m l / rows        token_mean   sum m l / tokens
    const_len   sum m l / (rows * C)                    seq_sum      sum_i sum_t m l / rows
    token_sum   sum m l
    Rows and tokens are those of the whole optimizer step (`denominators`), so the shares of any split add up.
    """
    per_row = masked_sum(losses.expand(mask.shape), mask, dim=1)
    if how == "seq_mean":
        per_row = per_row / mask.sum(1).clamp(min=1)
    return per_row.sum() / denominator


def group_index(group_id: Tensor) -> tuple[Tensor, int]:
    """Group ids [R], any integers in any order -> (index [R] in 0..groups-1, number of groups)."""
    _, index = group_id.unique(return_inverse=True)
    return index, int(index.max()) + 1 if len(index) else 0


def group_mean(values: Tensor, group_id: Tensor) -> Tensor:
    """Mean over the rows of a group that are not NaN, for each row [R] float64; NaN where a group has none."""
    index, groups = group_index(group_id)
    valid = ~values.isnan()
    zeros = values.new_zeros(groups)
    total = zeros.index_add(0, index, values.nan_to_num(0.0) * valid)
    count = zeros.index_add(0, index, valid.to(values.dtype))
    return (total / count)[index]


def group_std(values: Tensor, group_id: Tensor, ddof: int = 1) -> Tensor:
    """Standard deviation over the rows of a group that are not NaN, for each row [R]; two passes.

    NaN where a group has `ddof` answers or fewer.
    """
    index, groups = group_index(group_id)
    valid = ~values.isnan()
    squares = (values - group_mean(values, group_id)).nan_to_num(0.0) ** 2 * valid
    zeros = values.new_zeros(groups)
    count = zeros.index_add(0, index, valid.to(values.dtype)) - ddof
    variance = zeros.index_add(0, index, squares) / count.where(count > 0, count * float("nan"))
    return variance.sqrt()[index]


def group_equal(values: Tensor, group_id: Tensor) -> Tensor:
    """[R] bool: the answers of the row's group (NaN apart) are all equal up to rounding; true for fewer than two."""
    index, groups = group_index(group_id)
    valid = ~values.isnan()
    high = values.new_full((groups,), -float("inf")).scatter_reduce(0, index[valid], values[valid], "amax")
    low = values.new_full((groups,), float("inf")).scatter_reduce(0, index[valid], values[valid], "amin")
    size = high.abs().maximum(low.abs()).clamp(min=1)
    return (~(high - low > EQUAL * size))[index]
