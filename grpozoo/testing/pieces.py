"""Checks of hooks around the update: rewards, prompts, samplers, engines, parameter selection, evaluation."""

import math

import torch

from grpozoo.calls.inputs import contents, differing
from grpozoo.hooks import KINDS
from grpozoo.rewards.score import score
from grpozoo.sampling import Choice, Law
from grpozoo.testing.context import Context
from grpozoo.testing.example import select
from grpozoo.testing.steps import close
from grpozoo.testing.subject import Subject, claim
from grpozoo.types import Prompt, Request

LAW = torch.tensor([0.0, 0.35, 0.05, 0.2, 0.0, 0.3, 0.1, 0.0])  # probabilities; three ids must never appear
GROUPS, SIBLINGS = 600, 4
UNLIKELY = 1e-6  # chance of a false alarm for each table; the numbers are the same in every call


def check_reward(subject: Subject) -> None:
    """One number per row or None, the same whatever the order of the rows, and no rollout changed."""
    rollouts = subject.example().rollouts
    before = contents(rollouts)
    order = list(reversed(range(len(rollouts))))
    with subject.live() as live:
        own = {subject.name: live.plugin}
        plain = score(live.hooks, own, rollouts, live.run, timeout=60.0)
        path = differing(before, contents(rollouts))
        claim(path is None, f"reward() changed rollouts{path} in place")
        turned = score(live.hooks, own, rollouts.select(order), live.run, timeout=60.0)
    claim(plain.components or plain.vectors, "reward() answers nothing")
    for name, values in plain.components.items():
        claim(
            torch.equal(values[order].isnan(), turned.components[name].isnan()),
            f"reward {name!r} answers other rows when they are in another order",
        )
        close(
            turned.components[name].nan_to_num(),
            values[order].nan_to_num(),
            f"reward {name!r} with the rows in another order",
        )
    for name, values in plain.vectors.items():
        path = differing(contents([values[row] for row in order]), contents(list(turned.vectors[name])))
        claim(path is None, f"reward {name!r} differs with the rows in another order")


def check_prompts(subject: Subject) -> None:
    """A list of Prompts comes back; those given are untouched."""
    with subject.live() as live:
        given = live.run.task.train[:4]
        before = contents(list(given))
        answer = live.hooks.prepare_prompts(prompts=list(given), run=live.run)
        claim(
            isinstance(answer, list) and all(isinstance(prompt, Prompt) for prompt in answer),
            "prepare_prompts() gives a list of Prompt: a wrapper must return",
        )
        path = differing(before, contents(list(given)))
        claim(path is None, f"prepare_prompts() changed prompts{path} in place")


def check_parameters(subject: Subject) -> None:
    """Parameters of the policy, each once, with gradients on; no weight changes."""
    with subject.live() as live:
        model = live.run.policy.model
        model.requires_grad_(False)
        before = [
            (value, value.detach().clone()) for value in model.parameters()
        ]  # a plugin may wrap modules, and so rename
        groups = live.hooks.select_parameters(policy=live.run.policy)
        chosen = [parameter for group in groups for parameter in group["params"]]
        known = {id(parameter) for parameter in model.parameters()}
        claim(chosen, "select_parameters() selects nothing")
        claim(
            all(id(parameter) in known for parameter in chosen),
            "select_parameters() selects a tensor that is no parameter of the policy",
        )
        claim(
            len({id(parameter) for parameter in chosen}) == len(chosen), "select_parameters() selects a parameter twice"
        )
        on = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        claim(
            on == {id(parameter) for parameter in chosen},
            "requires_grad is on for other parameters than the selected ones",
        )
        claim(
            all(torch.equal(old, value) for value, old in before),
            "select_parameters() changes weights",
        )


def check_evaluate(subject: Subject) -> None:
    """Names and finite numbers; the held-out rows are untouched."""
    step = select(subject.example(), [0, 1, 4])
    before = contents((step.rollouts, step.rewards))
    with subject.live() as live:
        answers = [
            answer
            for answer in live.hooks.evaluate(rollouts=step.rollouts, rewards=step.rewards, run=live.run)
            if answer
        ]
        for name, value in (pair for answer in answers for pair in answer.items()):
            claim(
                isinstance(value, int | float) and math.isfinite(value),
                f"evaluate() gives {name} = {value!r}, not a finite number",
            )
    path = differing(before, contents((step.rollouts, step.rewards)))
    claim(path is None, f"evaluate() changed {path} in place")


def check_sampler_law(subject: Subject) -> None:
    """Every sibling follows the law at every position, and no id of probability 0 is drawn."""
    from scipy.stats import chi2

    with subject.live() as live:
        tokens = draw(live.hooks.token_sampler(run=live.run), _requests(GROUPS), live.run, positions=2)
    grid = tokens.view(GROUPS, SIBLINGS, 2)
    impossible = LAW[grid] == 0
    claim(
        not bool(impossible.any()),
        f"id {grid[impossible][0].item() if impossible.any() else 0} has probability 0 and was drawn",
    )
    expected = GROUPS * LAW
    pairs = GROUPS * torch.outer(LAW, LAW)
    for sibling in range(SIBLINGS):
        tables = [
            (torch.bincount(grid[:, sibling, position], minlength=len(LAW)), expected, f"at position {position}")
            for position in (0, 1)
        ]
        joint = torch.bincount(grid[:, sibling, 0] * len(LAW) + grid[:, sibling, 1], minlength=len(LAW) ** 2)
        tables.append((joint, pairs.flatten(), "in two tokens together"))
        for counts, wanted, where in tables:
            live_cells = wanted > 0
            statistic = ((counts - wanted)[live_cells] ** 2 / wanted[live_cells]).sum().item()
            chance = chi2.sf(statistic, int(live_cells.sum()) - 1)
            claim(
                chance > UNLIKELY,
                f"sibling {sibling} does not follow the law {where}: chi-square {statistic:.1f} (chance {chance:.1e})",
            )


def check_sampler_calls(subject: Subject) -> None:
    """The same tokens however requests are split over engines, and rows over calls of next()."""
    requests = _requests(12)
    with subject.live() as live:
        run = live.run

        def sampler():
            return live.hooks.token_sampler(run=run)

        plain = draw(sampler(), requests, run, positions=70)
        halves = torch.cat([draw(sampler(), part, run, positions=70) for part in (requests[:5], requests[5:])])
        claim(torch.equal(plain, halves), "the tokens depend on which requests one engine gets")
        evens = [row for row in range(len(plain)) if row % 2 == 0]
        odds = [row for row in range(len(plain)) if row % 2]
        slabs = draw(sampler(), requests, run, positions=70, parts=[evens, odds])
        claim(
            torch.equal(plain, slabs), "the tokens depend on which rows are decoded together (one slab after the other)"
        )
        mixed = draw(sampler(), requests, run, positions=70, parts=[evens, odds], together=True)
        claim(torch.equal(plain, mixed), "the tokens depend on which rows one call of next() gets")
        other = draw(sampler(), requests, Context(live.run.config, live.active, step=2), positions=70)
        claim(not torch.equal(plain, other), "step 2 draws the tokens of step 1")


def draw(
    sampler, requests: list[Request], run, positions: int, parts: list[list[int]] | None = None, together: bool = False
):
    """Tokens [rows, positions] under LAW. parts: rows of each call of next(); together: position by position."""
    count = sum(len(request.sample_ids) for request in requests)
    parts = parts or [list(range(count))]
    tokens = torch.zeros(count, positions, dtype=torch.int64)
    sampler.start(requests, run.config.seed, run.step, positions)
    order = [(part, position) for part in parts for position in range(positions)]
    for part, position in sorted(order, key=lambda pair: pair[1]) if together else order:
        choice = Choice(Law(1.0).warp(LAW.log().expand(len(part), -1)))
        tokens[part, position] = sampler.next(choice, torch.tensor(part), position)
    return tokens


def _requests(groups: int) -> list[Request]:
    return [Request(Prompt(f"p{group % 50}", text="?"), group, tuple(range(SIBLINGS))) for group in range(groups)]


def check_engine(subject: Subject) -> None:
    """Rows in the order of the requests; prefix masks; log-probabilities are the policy's under the sampling law."""
    with subject.live() as live:
        run = live.run
        requests = [
            Request(Prompt(f"p{index}", text=text), 7 * index, tuple(range(3)))
            for index, text in enumerate(("5 6 7", "8", "9 10 11 12"))
        ]
        sampler = live.hooks.token_sampler(run=run)
        rollouts = live.hooks.generate(
            requests=requests, sampler=sampler, law=run.policy.law, policy=run.policy, run=run
        )
        wanted = [(request.group_id, sample) for request in requests for sample in request.sample_ids]
        found = list(zip(rollouts.group_id.tolist(), rollouts.sample_id.tolist(), strict=True))
        claim(found == wanted, "the rows are not in the order of the requests")
        mask = rollouts.completion_mask
        claim(
            bool((mask[:, 1:] <= mask[:, :-1]).all()) and bool(mask[:, 0].all()),
            "completion_mask is not a prefix of at least one token",
        )
        claim(
            not bool(rollouts.completion_ids[~mask].any()) and not bool(rollouts.logprobs[~mask].any()),
            "ids or logprobs are not 0 where masked",
        )
        with torch.no_grad():
            gap = (run.policy.output(rollouts, shared_prefix=False).logprobs - rollouts.logprobs).abs().max().item()
        claim(gap < 1e-3, f"recorded log-probabilities differ from the policy's by {gap:.3g} nats")


def check_kinds(subject: Subject) -> None:
    """Hooks of kind chain are wrappers."""
    active = subject.fresh().active
    for hook, kind in KINDS.items():
        for impl in getattr(active.hooks, hook).get_hookimpls():
            if impl.plugin_name == subject.name and kind == "chain":
                claim(
                    impl.wrapper or impl.hookwrapper,
                    f"{hook}() is a chain: write @hookimpl(wrapper=True) and `yield`, or it replaces everybody else",
                )
