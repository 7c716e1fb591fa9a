"""Checks of advantage, policy_loss, token_weights, regularizer and their neighbours on a step of tensors."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from grpozoo.calls.inputs import contents, differing
from grpozoo.cycle import Cycle
from grpozoo.testing.example import Fixture, garble, leaf, regroup, relabel, retotal, select, widen
from grpozoo.testing.subject import DATA, Live, Subject, claim, gradients
from grpozoo.types import Output
from grpozoo.update import batch_of

GARBAGE = (1e30, math.inf, -math.inf, math.nan)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}  # sums of fewer than 100 terms of size 1


def close(found: Tensor, expected: Tensor, what: str) -> None:
    """Equal within the rounding of the coarser dtype."""
    claim(found.shape == expected.shape, f"{what}: shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    tolerance = max(TOLERANCE.get(values.dtype, 0.0) for values in (found, expected))
    gap = (found.double() - expected.double()).abs()
    claim(bool((gap <= tolerance * expected.abs().clamp(min=1)).all()), f"{what}: differs by {gap.max().item():.3g}")


def observe(live: Live, step: Fixture) -> dict[str, Tensor]:
    """Everything the hooks make of a step, [R, T] each: by row and token, so that disturbed steps can be compared."""
    step = live.begin(step)
    seen = {"advantage": step.batch.advantages} | live.tokens(step)
    _, grads = live.value_and_gradients(step)
    return seen | dict(zip(("gradient", "gradient of the entropy"), grads, strict=False))


def check_inputs(subject: Subject) -> None:
    """No hook changes a tensor that it was given."""
    with subject.live() as live:
        before: list[dict] = []
        broken: list[str] = []

        def enter(hook, implementations, arguments):
            before.append({name: contents(value) for name, value in arguments.items() if isinstance(value, DATA)})

        def leave(outcome, hook, implementations, arguments):
            for name, content in before.pop().items():
                path = differing(content, contents(arguments[name]))
                if path is not None:
                    broken.append(f"{hook}() changed {name}{path} in place")

        undo = live.active.manager.add_hookcall_monitoring(enter, leave)
        step = live.begin(subject.example())
        live.value_and_gradients(step)
        live.hooks.transform_rewards(rollouts=step.rollouts, rewards=step.rewards, run=live.run)
        undo()
        claim(not broken, broken[0] if broken else "")


def check_row_order(subject: Subject) -> None:
    """Permuted rows give permuted results."""
    step = subject.example()
    order = torch.randperm(len(step.rollouts), generator=torch.Generator().manual_seed(1)).tolist()
    _compare(subject, step, select(step, order), lambda values: values[order], "with the rows in another order")


def check_padding(subject: Subject) -> None:
    """Wider padding changes nothing."""
    step = subject.example()
    _compare(
        subject,
        step,
        widen(step, 3),
        lambda values: torch.nn.functional.pad(values, (0, 3)),
        "with 3 more columns of padding",
    )


def check_garbage(subject: Subject) -> None:
    """What stands at masked positions changes nothing."""
    step = subject.example()
    for garbage in GARBAGE:
        _compare(subject, step, garble(step, garbage), lambda values: values, f"with {garbage} at masked positions")


def check_group_ids(subject: Subject) -> None:
    """Group ids are names: other integers, the same groups, the same results."""
    step = subject.example()
    _compare(subject, step, relabel(step), lambda values: values, "with other integers as group ids")


def _compare(subject: Subject, step: Fixture, disturbed: Fixture, expected, how: str) -> None:
    with subject.live() as live:
        plain = observe(live, step)
    with subject.live() as live:
        seen = observe(live, disturbed)
    mask = disturbed.batch.mask
    for name, values in seen.items():
        if name.startswith("gradient"):
            claim(not bool(values.masked_fill(mask, 0).any()), f"{how}: there is a {name} at masked positions")
        close(values.masked_fill(~mask, 0), expected(plain[name]).masked_fill(~mask, 0), f"{how}, {name}")


def check_mask(subject: Subject) -> None:
    """Masked positions get no gradient, live ones a finite one; a step without tokens has loss 0."""
    with subject.live() as live:
        step = live.begin(subject.example())
        value, grads = live.value_and_gradients(step)
        claim(bool(value.isfinite()), f"the loss is {value.item()}")
        for grad in grads:
            claim(bool(grad.isfinite().all()), "the gradient is not finite")
            claim(not bool(grad.masked_fill(step.batch.mask, 0).any()), "there is a gradient at masked positions")
    with subject.live() as live:
        whole = live.begin(subject.example())
        nothing = replace(
            whole.batch, mask=torch.zeros_like(whole.batch.mask), lengths=torch.zeros_like(whole.batch.lengths)
        )
        value = live.objective(whole, batch=nothing)
        grads = gradients(value, [whole.out.logprobs])
        claim(
            float(value.detach()) == 0.0 and not bool(grads[0].any()),
            "a micro-batch without tokens has a loss or a gradient that is not 0",
        )


def check_micro_batches(subject: Subject) -> None:
    """The shares of any split add up to the whole step, in value and gradient."""
    for seed, sizes in ((0, (3, 1, 4)), (1, (1, 1, 2)), (2, (5, 2, 4))):
        with subject.live() as live:
            step = live.begin(subject.example())
            value, (grad, *_) = live.value_and_gradients(step)
            logprobs, entropy = leaf(step.out.logprobs), leaf(step.out.entropy)
            cycle = Cycle(step.rollouts, step.rewards, step.batch.advantages, [], tables=dict(step.batch.tables))
            order = torch.randperm(len(step.rollouts), generator=torch.Generator().manual_seed(seed)).tolist()
            total = torch.zeros((), dtype=value.dtype)
            for rows in _split(order, sizes):
                batch = batch_of(cycle, rows, torch.device("cpu"))
                width = batch.mask.shape[1]
                out = Output(logprobs[rows, :width], None if entropy is None else entropy[rows, :width])
                total = total + live.objective(step, batch, out)
            close(total.detach(), value, "the loss of micro-batches")
            close(gradients(total, [logprobs])[0], grad, "the gradient of micro-batches")


def _split(rows: list[int], sizes: tuple[int, ...]) -> list[list[int]]:
    parts, start, turn = [], 0, 0
    while start < len(rows):
        parts.append(rows[start : start + sizes[turn % len(sizes)]])
        start += len(parts[-1])
        turn += 1
    return parts


def check_zero_advantage(subject: Subject) -> None:
    """Rows of advantage 0 have policy loss 0 and, unless all rows are needed, no gradient: the core skips them."""
    with subject.live() as live:
        step = live.begin(subject.example())
        zero = torch.arange(len(step.rollouts)) % 2 == 0
        batch = replace(step.batch, advantages=step.batch.advantages.masked_fill(zero[:, None], 0.0))
        seen = live.tokens(step._replace(batch=batch))
        product = (seen["policy_loss"] * seen["token_weights"]).masked_fill(~batch.mask, 0)
        claim(not bool(product[zero].any()), "policy_loss() is not 0 where the advantage is 0")
        if "all_rows" in live.needs:
            return
        grad = gradients(live.objective(step, batch=batch), [step.out.logprobs])[0]
        claim(
            not bool(grad[zero].any()),
            'a row of advantage 0 has a gradient: let it need "all_rows", or the core skips the row',
        )


def check_equal_rewards(subject: Subject) -> None:
    """Groups whose rewards are all equal have advantage exactly 0."""
    step = subject.example()
    rows = [1 + row % 2 for row in range(20)]
    step = regroup(step, rows, [8] * 7 + [3] * 13)  # sums of 7 and of 13 round
    for values in ([0.1] * 20, [0.7] * 20, [0.3 if row % 2 else 0.1 + 0.2 for row in range(20)]):
        with subject.live() as live:
            answer = live.wide_advantage(retotal(step, values))
            claim(
                not bool(answer.any()),
                f"equal rewards {values[0]!r} have advantages up to {answer.abs().max().item():.3g}",
            )


def check_singleton(subject: Subject) -> None:
    """A row without siblings has a finite advantage, 0 where the baseline is the group's."""
    with subject.live() as live:
        step = subject.example()
        answer = live.wide_advantage(step)
        ids = step.rollouts.group_id
        alone = (ids[:, None] == ids).sum(1) == 1
        claim(
            not bool(answer[alone].any()),
            f"a group of one row has advantage {answer[alone].abs().max().item() if alone.any() else 0:.3g}",
        )


def check_missing_rewards(subject: Subject) -> None:
    """A row without a reward leaves its group: its siblings get what they get without it, and nobody NaN."""
    nan = math.nan
    step = regroup(subject.example(), range(4), [5, 5, 5, 5])
    for totals in ([1.0, 0.0, nan, nan], [1.0, nan, 0.0, 0.25], [nan, nan, 1.0, nan], [nan] * 4):
        shown = ", ".join("None" if total != total else f"{total:g}" for total in totals)
        rows = [row for row, total in enumerate(totals) if total == total]
        with subject.live() as live:
            found = live.wide_advantage(retotal(step, totals))
        claim(bool(found.isfinite().all()), f"rewards [{shown}] give advantages that are not finite")
        if rows:
            with subject.live() as live:
                alone = live.wide_advantage(select(retotal(step, totals), rows))
            close(found[rows], alone, f"rewards [{shown}]: the rows that have one")


def check_transform(subject: Subject) -> None:
    """transform_rewards keeps the rows: a total [R] float64, permuted with them."""
    step = subject.example()
    order = list(reversed(range(len(step.rollouts))))
    other = select(step, order)
    with subject.live() as live:
        plain = live.hooks.transform_rewards(rollouts=step.rollouts, rewards=step.rewards, run=live.run)
    with subject.live() as live:
        turned = live.hooks.transform_rewards(rollouts=other.rollouts, rewards=other.rewards, run=live.run)
    claim(plain is not None and plain.total is not None, "transform_rewards() gives no total: a wrapper must return")
    claim(
        plain.total.shape == (len(order),) and plain.total.dtype == torch.float64,
        f"the total is [R] float64, got {tuple(plain.total.shape)} {plain.total.dtype}",
    )
    close(
        turned.total.nan_to_num(), plain.total[order].nan_to_num(), "transform_rewards() with the rows in another order"
    )


def check_resample(subject: Subject) -> None:
    """resample gives as many rewards as rollouts, each (tag, group, sample) once."""
    step = subject.example()
    with subject.live() as live:
        answer = live.hooks.resample(rollouts=step.rollouts, rewards=step.rewards, run=live.run)
        claim(
            isinstance(answer, tuple) and len(answer) == 2,
            "resample() gives (Rollouts, Rewards): a wrapper must return",
        )
        rollouts, rewards = answer
        claim(
            len(rollouts) == len(rewards.total),
            f"resample() gives {len(rollouts)} rollouts and {len(rewards.total)} rewards",
        )
        keys = set(zip(rollouts.tag, rollouts.group_id.tolist(), rollouts.sample_id.tolist(), strict=True))
        claim(len(keys) == len(rollouts), "resample() gives one (tag, group_id, sample_id) twice")
