"""The data that flows between hooks: frozen, struct-of-arrays, one row per completion.

Letters: R rows of a step, r rows of a micro-batch, T completion tokens (padded on the right), G group size.
Logarithms are natural, log-probabilities in nats, lengths in tokens. Change data with `dataclasses.replace`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One problem: either `text` (plain) or `messages` (chat), never both."""

    id: str  # stable across runs, unique in its task
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None  # {"role": ..., "content": ...}
    answer: str | None = None  # what the verifier compares with; never shown to the model
    extra: Mapping[str, Any] = field(default_factory=dict)  # verifier-only fields: steps, scaffold, oracle, rubric


@dataclass(frozen=True)
class Request:
    """Ask for completions of one prompt. Several requests may share a group; a prompt may be asked for twice."""

    prompt: Prompt
    group_id: int  # rows that share a baseline; unique in the step
    sample_ids: tuple[int, ...]  # one completion for each; unique in the group
    tag: str = "train"  # the pass, part of the random stream's key: "train", "eval", a plugin's second pass
    policy: str = "policy"  # which named policy answers


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Completions of a step. `None` where a quantity was not computed because no plugin needs it."""

    prompts: tuple[Prompt, ...]  # [R]
    group_id: Tensor  # [R] int64
    sample_id: Tensor  # [R] int64
    prompt_ids: tuple[tuple[int, ...], ...]  # [R] ragged token ids, as the model saw them
    completion_ids: Tensor  # [R, T] int64, padding 0 beyond the mask
    completion_mask: Tensor  # [R, T] bool, tokens the policy sampled, stop token included
    logprobs: Tensor  # [R, T] float32, nats, under the law really sampled from; 0 where masked
    finish_reason: tuple[str, ...]  # [R] "stop" | "length"
    text: tuple[str, ...]  # [R] decoded completion without special tokens
    tag: tuple[str, ...]  # [R] Request.tag
    policy: tuple[str, ...]  # [R] Request.policy; a name that is no policy of the run: a given completion (run.given)
    design: Mapping[str, Tensor] = field(default_factory=dict)  # [R] each: what the sampler must remember of a row
    old_logprobs: Tensor | None = None  # [R, T] float32, nats, the policy before the step's first update
    ref_logprobs: Tensor | None = None  # [R, T] float32, nats, the reference policy
    entropy: Tensor | None = None  # [R, T] float32, nats, of the policy before the step's first update

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> Tensor:
        """[R] int64, completion tokens, stop token included."""
        return self.completion_mask.sum(1)

    def select(self, rows: Sequence[int]) -> Rollouts:
        """The given rows in the given order."""
        return replace(self, **{f.name: _take(getattr(self, f.name), rows) for f in fields(self)})


@dataclass(frozen=True, eq=False)
class Rewards:
    """What the reward plugins answered. NaN means "no answer": such a row leaves its group."""

    components: Mapping[str, Tensor]  # name -> [R] float64, unweighted
    weights: Mapping[str, float]  # name -> weight in the total
    vectors: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)  # name -> R matrices [m, d] float64
    total: Tensor | None = None  # [R] float64: weighted sum of the components that answered; NaN if none did
    tokens: Tensor | None = None  # [R, T] float64, rewards of single tokens, already part of the total; 0 where masked

    def select(self, rows: Sequence[int]) -> Rewards:
        """The given rows in the given order."""
        return Rewards(
            {name: _take(value, rows) for name, value in self.components.items()},
            self.weights,
            {name: _take(value, rows) for name, value in self.vectors.items()},
            _take(self.total, rows),
            _take(self.tokens, rows),
        )


@dataclass(frozen=True, eq=False)
class Batch:
    """What is fixed while a micro-batch is trained on. All [r, T] tensors are finite and 0 where masked."""

    advantages: Tensor  # [r, T] float32
    mask: Tensor  # [r, T] bool, tokens the policy sampled
    old_logprobs: Tensor  # [r, T] float32, nats
    sampler_logprobs: Tensor  # [r, T] float32, nats, recorded while sampling
    lengths: Tensor  # [r] int64
    rewards: Tensor  # [r] float64, the total; may hold NaN
    group_id: Tensor  # [r] int64
    sample_id: Tensor  # [r] int64
    rows: Tensor  # [r] int64, positions in the step's Rollouts
    rollouts: Rollouts  # the r rows, for what is rarely needed
    ref_logprobs: Tensor | None = None  # [r, T] float32; None unless a plugin needs "ref_logprobs"
    tables: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # name -> [r, T]: these rows of what minibatch() answered


@dataclass(frozen=True, eq=False)
class Output:
    """What carries the gradient."""

    logprobs: Tensor  # [r, T] float32, nats, of the sampled tokens under the sampling law; 0 where masked
    entropy: Tensor | None = None  # [r, T] float32, nats; None unless a plugin needs "entropy"


def _take(value: Any, rows: Sequence[int]) -> Any:
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(value[int(row)] for row in rows)
    if isinstance(value, Mapping):
        return {name: _take(item, rows) for name, item in value.items()}
    return value[list(map(int, rows))]


def concatenate(parts: Sequence[Any]) -> Any:
    """Rows of several Rollouts (or of several Rewards) one after the other, padded to the longest completion.

    A quantity that one part lacks (old_logprobs before it was measured) is None in the result; a reward component that
    one part lacks is NaN there, "no answer"; what a sampler remembers of its rows is -1 for rows of another origin.
    """
    kind = type(parts[0])
    if kind is Rollouts:
        columns = {name: column for part in parts for name, column in part.design.items()}
        parts = [
            replace(part, design={n: part.design.get(n, c.new_full((len(part),), -1)) for n, c in columns.items()})
            for part in parts
        ]
    if kind is Rewards:
        names = dict.fromkeys(name for part in parts for name in part.components)
        full = [
            {n: part.components.get(n, part.total.new_full((len(part.total),), float("nan"))) for n in names}
            for part in parts
        ]
        weights = {name: weight for part in parts for name, weight in part.weights.items()}
        parts = [replace(part, components=more, weights=weights) for part, more in zip(parts, full, strict=True)]
    return kind(**{f.name: _join([getattr(part, f.name) for part in parts]) for f in fields(kind)})


def _join(values: list[Any]) -> Any:
    first = values[0]
    if any(value is None for value in values):
        return None
    if isinstance(first, tuple):
        return tuple(item for value in values for item in value)
    if isinstance(first, Mapping):
        return {name: _join([value[name] for value in values]) for name in first}
    if isinstance(first, int | float):
        return first  # a weight, the same in all parts
    widths = [max(value.shape[axis] for value in values) for axis in range(1, first.ndim)]
    joined, start = first.new_zeros([sum(map(len, values)), *widths]), 0
    for value in values:
        joined[(slice(start, start + len(value)), *(slice(size) for size in value.shape[1:]))] = value
        start += len(value)
    return joined
