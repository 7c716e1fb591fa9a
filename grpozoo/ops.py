"""Reductions over tokens, rows and groups: pure functions on tensors. Every mean names what it divides by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATIONS = ("seq_mean", "token_mean", "const_len", "seq_sum", "token_sum")
KL_ESTIMATORS = ("k1", "k2", "k3", "k3_plus")
LOG_RATIO = 20.0  # log ratios are clamped to +- this before they are exponentiated
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


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """exp(logp - logp_old), new over old, its logarithm clamped to +-20."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO, LOG_RATIO).exp()


def clip_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-min(w A, clip(w, 1 - low, 1 + high) A), the shape of the arguments."""
    return -(ratio * advantages).minimum(ratio.clamp(1 - low, 1 + high) * advantages)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(policy || reference) from samples of the policy, nats, elementwise; x = logp - logp_ref.

    k1   x                    as a reward its gradient is that of the KL; as a loss its gradient vanishes in expectation
    k2   x^2 / 2              as a loss: the gradient of KL(policy || reference)
    k3   exp(-x) + x - 1      >= 0; as a loss: the gradient of KL(reference || policy)
    k3_plus                   the value of k3 with the gradient of k2
    """
    x = (logprobs - ref_logprobs).clamp(-LOG_RATIO, LOG_RATIO)
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x**2 / 2
    k3 = (-x).expm1() + x
    return k3 if estimator == "k3" else k3.detach() + x**2 / 2 - (x**2 / 2).detach()


def top_k_mask(scores: Tensor, candidates: Tensor, k: int) -> Tensor:
    """[n, T] bool: the k candidates with the highest scores, all of them if there are fewer; ties by lowest index."""
    flat, allowed = scores.detach().flatten(), candidates.flatten().nonzero()[:, 0]
    chosen = allowed[flat[allowed].argsort(descending=True, stable=True)[:k]]
    mask = candidates.new_zeros(flat.shape)
    mask[chosen] = True
    return mask.view(candidates.shape)


def whiten(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """(v - mean) / sqrt(var + eps) over the tokens in `mask`, ddof 1; 0 where masked, 0 throughout for equal values."""
    count = int(mask.sum())
    if count < 2:
        return values.new_zeros(values.shape)
    centred = (values - masked_mean(values, mask)).masked_fill(~mask, 0)
    if float(centred.abs().max()) <= EQUAL * max(1.0, float(values.masked_fill(~mask, 0).abs().max())):
        return values.new_zeros(values.shape)
    return centred / (centred.square().sum() / (count - 1) + eps).sqrt()


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


def weighted_total(
    components: Mapping[str, Tensor], weights: Mapping[str, float], like: Tensor | None = None
) -> Tensor:
    """[R] float64: weighted sum of the components that answered; NaN where none did.

    Weights act on raw values, before any normalisation. A component of weight 0 is only watched: its answer does not
    make a row count. `like`: any numbers [R], for the length of the result (all NaN) where there are no components.
    """
    total = next(iter(components.values()), like).double() * 0.0
    total = total.nan_to_num(nan=0.0)
    answered = total != 0.0
    for name, values in components.items():
        if weights[name]:
            total = total + weights[name] * values.double().nan_to_num(nan=0.0)
            answered = answered | ~values.isnan()
    return total.masked_fill(~answered, float("nan"))
