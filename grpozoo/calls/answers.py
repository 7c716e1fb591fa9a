"""What each hook must answer: one function for each, called with the answer and with the hook's own arguments.

It raises `Unfit` with what came and what is expected. `inner` is what the other plugins had answered where the answer
comes from a wrapper; None elsewhere. None itself ("no opinion") is never asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from numbers import Real
from typing import Any

EXPECTED: dict[str, Callable[..., None]] = {}  # hook -> its function
WITHOUT_ANSWER = frozenset({"after_step"})  # hooks whose effect is looked at although they answer None


class Unfit(Exception):
    """An answer that its hook does not expect."""

    def __init__(self, came: str, expected: str):
        super().__init__(came, expected)
        self.came, self.expected = came, expected


def expects(check: Callable[..., None]) -> Callable[..., None]:
    """The function of that name says what the hook of that name expects."""
    EXPECTED[check.__name__] = check
    return check


class Came(str):
    """Words about what came."""


def described(value: Any) -> str:
    """What came, in a few words."""
    if hasattr(value, "_version"):
        return f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str | Real):
        return f"{value!r:.60} ({type(value).__name__})"
    size = f" of {len(value)}" if isinstance(value, list | tuple | Mapping) else ""
    return f"a value of type {type(value).__name__}{size}"


def require(condition: Any, came: Any, expected: str) -> None:
    """Raise Unfit unless the condition holds. came: the value itself, or what to call it (a `Came`)."""
    if not condition:
        raise Unfit(came if isinstance(came, Came) else described(came), expected)


# Before and around the steps


@expects
def validate(answer, **_):
    require(isinstance(answer, str), answer, "a notice to print (a text), or nothing")


@expects
def setup(answer, **_):
    _nothing(answer)


@expects
def select_parameters(answer, **_):
    expected = 'a list of optimizer groups, e.g. [{"params": [parameter, ...], "lr_scale": 1.0}]'
    require(isinstance(answer, list | tuple), answer, expected)
    for group in answer:
        require(isinstance(group, Mapping), Came(f"a group that is {described(group)}"), expected)
        require("params" in group, Came(f"a group with the keys {', '.join(map(str, group))}"), expected)
        chosen, scale = group["params"], group.get("lr_scale", 1.0)
        require(isinstance(chosen, list | tuple), Came(f'"params" that is {described(chosen)}'), expected)
        for parameter in chosen:
            require(_is_tensor(parameter), Came(f'"params" with {described(parameter)}'), expected)
            require(
                parameter.requires_grad,
                Came("a parameter without requires_grad"),
                "requires_grad_(True) on what trains",
            )
        number = isinstance(scale, Real) and 0 <= scale < float("inf")
        require(number, Came(f'"lr_scale" that is {described(scale)}'), "a finite factor of lr, at least 0")


@expects
def token_sampler(answer, **_):
    from grpozoo.sampling import TokenSampler

    require(isinstance(answer, TokenSampler), answer, "an object of a class made from grpozoo.sampling.TokenSampler")


@expects
def prepare_prompts(answer, **_):
    from grpozoo.types import Prompt

    require(isinstance(answer, list | tuple), answer, "a list of grpozoo.Prompt")
    require(answer, Came("no prompt at all"), "a list of one grpozoo.Prompt at least")
    for prompt in answer:
        require(isinstance(prompt, Prompt), Came(f"a list with {described(prompt)}"), "a list of grpozoo.Prompt")


@expects
def after_step(answer, metrics, **_):
    if answer is not None:
        _nothing(answer)
    for name, value in metrics.items():
        require(isinstance(name, str), Came(f"metrics with the name {name!r:.60}"), "metrics[name] = number")
        require(
            value is None or _is_number(value),
            Came(f"metrics[{name!r}] = {described(value)}"),
            "metrics[name] = number",
        )


@expects
def evaluate(answer, **_):
    require(isinstance(answer, Mapping), answer, "a dictionary {name: number}")
    for name, value in answer.items():
        require(isinstance(name, str), Came(f"the name {name!r:.60}"), "a dictionary {name: number}")
        require(_is_number(value), Came(f"{name!r}: {described(value)}"), "one number for each name")


# Completions and rewards


@expects
def generate(answer, requests, **_):
    _whole(answer, "grpozoo.Rollouts")
    wanted = [(r.tag, r.group_id, sample) for r in requests for sample in r.sample_ids]
    expected = f"{len(wanted)} rows, one for each sample id of the requests"
    require(len(answer) == len(wanted), Came(f"{len(answer)} rows"), expected)
    found = list(zip(answer.tag, answer.group_id.tolist(), answer.sample_id.tolist(), strict=True))
    row = next((row for row, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]), None)
    if row is not None:
        expected = "the rows in the order of the requests and of their sample ids"
        raise Unfit(f"(tag, group_id, sample_id) {found[row]} in row {row}, where {wanted[row]} was asked", expected)


@expects
def reward(answer, **_):
    """What it may be is a long story, told by grpozoo.rewards.score."""


@expects
def transform_rewards(answer, rollouts, rewards, inner, **_):
    _fits(answer, rollouts)
    row = _first(answer.total.isinf())
    if row is not None:
        raise Unfit(f"the total {answer.total[row]:g} for {_sample(rollouts, row)}", "a finite total, or NaN for none")
    row = _first(answer.total.isnan() & _rewarded(rewards, inner, len(rollouts)))
    if row is not None:
        expected = "a number: NaN is for rows to which a reward plugin had no answer"
        raise Unfit(f"the total nan for {_sample(rollouts, row)}", expected)


@expects
def resample(answer, **_):
    expected = "the pair (Rollouts, Rewards), rewards of the same rows"
    require(isinstance(answer, tuple) and len(answer) == 2, answer, expected)
    rollouts, rewards = answer
    _whole(rollouts, "the pair (Rollouts, Rewards)")
    _fits(rewards, rollouts)
    require(
        len(rollouts), Came("no row at all"), "one row at least: leave a group that teaches nothing rather than none"
    )
    keys = list(zip(rollouts.tag, rollouts.group_id.tolist(), rollouts.sample_id.tolist(), strict=True))
    twice = next((key for key in keys if keys.count(key) > 1), None) if len(set(keys)) < len(keys) else None
    require(twice is None, Came(f"(tag, group_id, sample_id) {twice} twice"), "each of them once")


@expects
def token_rewards(answer, rollouts, **_):
    mask = rollouts.completion_mask
    expected = f"a tensor {tuple(mask.shape)}, one finite number per token, or None"
    require(_is_real_tensor(answer) and answer.shape == mask.shape, answer, expected)
    wrong = ~answer.isfinite() & mask
    row = _first(wrong.any(1))
    if row is not None:
        token = int(wrong[row].nonzero()[0])
        raise Unfit(f"{answer[row, token]:g} for token {token} of {_sample(rollouts, row)}", expected)


# The update


@expects
def advantage(answer, rollouts, rewards, **_):
    mask = rollouts.completion_mask
    expected = f"a tensor, one number per row {tuple(mask.shape[:1])} or token {tuple(mask.shape)}"
    require(_is_real_tensor(answer) and answer.shape in (mask.shape[:1], mask.shape), answer, expected)
    wide = (answer if answer.ndim == 2 else answer[:, None].expand(mask.shape)).float()
    row = _first((~wide.isfinite() & mask & ~rewards.total.isnan()[:, None]).any(1))
    if row is not None:
        raise Unfit(f"an advantage that is not finite for {_sample(rollouts, row)}", "finite numbers where rewards are")


@expects
def before_update(answer, **_):
    _nothing(answer)


@expects
def minibatch(answer, batch, **_):
    shape = tuple(batch.mask.shape)
    expected = f"a dictionary {{name: tensor {shape}}}, one number per token"
    require(isinstance(answer, Mapping), answer, expected)
    for name, table in answer.items():
        require(isinstance(name, str), Came(f"the name {name!r:.60}"), expected)
        require(_is_tensor(table) and tuple(table.shape) == shape, Came(f"{name!r}: {described(table)}"), expected)


@expects
def policy_loss(answer, batch, **_):
    _per_token(answer, batch)


@expects
def token_weights(answer, batch, **_):
    _per_token(answer, batch, " or None")


@expects
def regularizer(answer, batch, **_):
    if isinstance(answer, tuple):
        require(len(answer) == 2, answer, "terms, or the pair (terms, aggregation)")
        answer, rule = answer
        aggregation(rule)
    _per_token(answer, batch, " or None")


@expects
def aggregation(answer, **_):
    from grpozoo.errors import nearest
    from grpozoo.ops import AGGREGATIONS

    known = isinstance(answer, str) and answer in AGGREGATIONS
    close = "" if known else nearest(str(answer), AGGREGATIONS)
    require(known, Came(f"the aggregation {described(answer)}"), f"one of {', '.join(AGGREGATIONS)}{close}")


# What several of them look at


def _nothing(answer: Any) -> None:
    raise Unfit(described(answer), "nothing: the hook is for what the plugin does, its answer would be ignored")


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "_version")


def _is_real_tensor(value: Any) -> bool:
    return _is_tensor(value) and not value.is_complex()


def _is_number(value: Any) -> bool:
    """A number, or a tensor or array of one."""
    try:
        return isinstance(value.item() if hasattr(value, "item") else value, Real)
    except (ValueError, RuntimeError):  # more than one
        return False


def _per_token(answer: Any, batch: Any, otherwise: str = "") -> None:
    """One number per token [r, T] or per sequence [r, 1]; anything else would broadcast into nonsense."""
    rows, width = batch.mask.shape
    expected = f"a tensor, one number per token ({rows}, {width}) or per sequence ({rows}, 1){otherwise}"
    require(_is_real_tensor(answer) and tuple(answer.shape) in ((rows, width), (rows, 1)), answer, expected)


def _whole(rollouts: Any, expected: str) -> None:
    """Rollouts whose columns have one number of rows, and one of tokens."""
    import torch

    from grpozoo.types import Rollouts

    require(isinstance(rollouts, Rollouts), rollouts, expected)
    rows, mask = len(rollouts), rollouts.completion_mask
    require(
        _is_tensor(mask) and mask.dtype == torch.bool,
        Came(f"completion_mask: {described(mask)}"),
        "a tensor [R, T] of bool",
    )
    for f in fields(Rollouts):
        value = getattr(rollouts, f.name)
        for name, column in value.items() if isinstance(value, Mapping) else [(f.name, value)]:
            if column is not None and len(column) != rows:
                raise Unfit(f"{len(column)} rows in {name} beside {rows} prompts", "one row per completion everywhere")
    for name in ("completion_ids", "logprobs"):
        column = getattr(rollouts, name)
        expected = f"a tensor of the shape of completion_mask, {tuple(mask.shape)}"
        require(_is_tensor(column) and column.shape == mask.shape, Came(f"{name}: {described(column)}"), expected)
    row = _first((~rollouts.logprobs.isfinite() & mask).any(1))
    if row is not None:
        raise Unfit(
            f"logprobs that are not finite for {_sample(rollouts, row)}", "finite numbers where the mask is true"
        )


def _fits(rewards: Any, rollouts: Any) -> None:
    """Rewards with a total for each of the rows."""
    from grpozoo.types import Rewards

    require(isinstance(rewards, Rewards), rewards, "grpozoo.Rewards")
    expected = f"a total for each row, a tensor ({len(rollouts)},) of float64"
    total = rewards.total
    fits = _is_tensor(total) and total.is_floating_point() and tuple(total.shape) == (len(rollouts),)
    require(fits, Came(f"Rewards whose total is {described(total)}"), expected)


def _rewarded(rewards: Any, inner: Any, rows: int) -> Any:
    """[R] bool: every reward answered, and the other plugins made a total of the answers."""
    import torch

    known = torch.ones(rows, dtype=torch.bool)
    for column in rewards.components.values():
        known &= ~column.isnan()
    for column in rewards.vectors.values():
        known &= torch.tensor([not bool(matrix.isnan().any()) for matrix in column], dtype=torch.bool)
    if inner is not None and inner.total is not None:
        return known & ~inner.total.isnan()
    return known if any(rewards.weights[name] for name in rewards.components) else torch.zeros_like(known)


def _first(rows: Any) -> int | None:
    """The number of the first true row."""
    return int(rows.nonzero()[0]) if bool(rows.any()) else None


def _sample(rollouts: Any, row: int) -> str:
    return f"prompt {rollouts.prompts[row].id!r}, sample {int(rollouts.sample_id[row])}"
