"""Held-out evaluation: exact estimators of what k samples per prompt would give, and the pass that feeds them.

For a prompt with n samples, c of them right, rewards r_(1) <= ... <= r_(n), every subset of k samples equally likely:

    avg@n   = c / n                                              the accuracy of one sample
    pass@k  = 1 - C(n - c, k) / C(n, k)                          at least one of k is right
    best@k  = sum_{i=k..n} C(i - 1, k - 1) r_(i) / C(n, k)       the expected maximum of k rewards
    maj@k   = E[share of the vote winners that is right]         majority vote over final answers

Each is the mean over all subsets, not over random ones: no random number is drawn and 1 right of 4 gives pass@4 = 1.
A sample whose verdict is NaN ("no answer" of the verifier) is left out, so n differs between prompts; a prompt with
fewer than k samples left does not count. Prompts weigh equally. A mean over no prompt is NaN. Right means >= 1.

Where a token sampler couples the samples of a prompt, not every subset of k is distributed like k samples: the means
are then over the sets that the sampler names (TokenSampler.sets), a set of cells c_1 .. c_k standing for all ways to
take one sample from each cell. With F_j(v) = the share of c_j that is at most v,

    best@k  = mean over sets of sum_v v (prod_j F_j(v) - prod_j F_j(v-))            pass@k: the same of right = 1, wrong = 0
    maj@k   = mean over sets of the vote                                          if every cell is one sample
    bound@k = mean over prompts of min(1, k c / n)                                no coupling that keeps the law has more

A prompt with a NaN counts for k = 1 only: a set with a hole is no set. An estimate without a valid set is left out.
c / n stands for the accuracy in bound@k, so it is low for k near n, and pass@n itself for k = n: take n several times k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import comb, fsum, isnan, nan, prod
from typing import TYPE_CHECKING, Any

from grpozoo.errors import UserError, unknown
from grpozoo.types import Request

if TYPE_CHECKING:
    from grpozoo.sampling import TokenSampler
    from grpozoo.types import Rewards, Rollouts

Sets = list[list[list[int]]]  # sets of cells of samples, as TokenSampler.sets names them


def avg_at_k(correct: Iterable[Iterable[float]]) -> float:
    """Accuracy of one sample, the same for every k: mean over prompts of the share of their samples that is right."""
    return _mean(sum(row) / len(row) for row in _verdicts(correct) if row)


def pass_at_k(correct: Iterable[Iterable[float]], k: int) -> float:
    """Unbiased pass@k. `correct`: [prompts, n] or ragged; 1 right, 0 wrong, NaN unknown."""
    rows = (row for row in _verdicts(correct) if len(row) >= k)
    return _mean(1 - comb(len(row) - sum(row), k) / comb(len(row), k) for row in rows)


def best_at_k(rewards: Iterable[Iterable[float]], k: int) -> float:
    """Expected largest of k rewards. `rewards`: [prompts, n] or ragged, in the unit of the reward; NaN unknown."""
    rows = (sorted(value for value in row if not isnan(value)) for row in _rows(rewards))
    pairs = (zip(best_weights(len(row), k), row, strict=True) for row in rows if len(row) >= k)
    return _mean(fsum(weight * reward for weight, reward in row) for row in pairs)


def maj_at_k(answers: Iterable[Iterable[Hashable]], correct: Iterable[Iterable[float]], k: int) -> float:
    """Expected credit of a majority vote among k samples; of m answers with equal votes each wins with chance 1/m.

    `answers`: [prompts, n] or ragged, None where a completion has no final answer: it takes one of the k places, casts
    no vote and never wins; a vote without votes is wrong. An answer's credit is the share of its samples that is right.
    """
    credits = []
    for names, verdicts in zip(_rows(answers), _rows(correct), strict=True):
        known = [(name, value >= 1) for name, value in zip(names, verdicts, strict=True) if not isnan(value)]
        if len(known) >= k:
            credits.append(_vote(known, k))
    return _mean(credits)


def best_of_sets(values: Iterable[Iterable[float]], sets: Iterable[Sets]) -> float:
    """best@k over the sets [prompts] of each prompt; of verdicts: pass@k. values: [prompts, n]; NaN: the prompt is out."""
    pairs = zip(_rows(values), sets, strict=True)
    return _mean(_mean(_largest(row, cells) for cells in its) for row, its in pairs if not any(map(isnan, row)))


def maj_of_sets(
    answers: Iterable[Iterable[Hashable]], correct: Iterable[Iterable[float]], sets: Iterable[Sets]
) -> float:
    """maj@k over sets whose cells hold one sample each; a prompt with a NaN verdict is out."""
    credits = []
    for names, verdicts, its in zip(_rows(answers), _rows(correct), sets, strict=True):
        if not any(map(isnan, verdicts)):
            votes = [[(names[row], verdicts[row] >= 1) for (row,) in cells] for cells in its]
            credits.append(_mean(_vote(known, len(known)) for known in votes))
    return _mean(credits)


def bound_at_k(correct: Iterable[Iterable[float]], k: int) -> float:
    """The most that pass@k can be, whatever the coupling, if the share of right samples is each prompt's accuracy."""
    return _mean(min(1.0, k * sum(row) / len(row)) for row in _verdicts(correct) if row)


def distinct(texts: Iterable[Iterable[str]], correct: Iterable[Iterable[float]]) -> float:
    """Different right completions among all samples of a prompt, mean over prompts; grows with the samples taken."""
    rows = zip(_rows(texts), _rows(correct), strict=True)
    return _mean(len({text for text, value in zip(*row, strict=True) if value >= 1}) for row in rows)


def group_shares(correct: Iterable[float], group_id: Iterable[int]) -> dict[str, float]:
    """Shares of the groups that are all right, all wrong and mixed. Rows [R] with verdict NaN are left out."""
    groups = [row for row in _verdicts(by_group(group_id, correct)) if row]
    right = _mean(all(row) for row in groups)
    wrong = _mean(not any(row) for row in groups)
    return {"groups/all_right": right, "groups/all_wrong": wrong, "groups/mixed": 1 - right - wrong}


def by_group(group_id: Iterable[int], values: Iterable[Any]) -> list[list[Any]]:
    """Values [R] -> one list for each group, in the order in which the groups first appear."""
    groups: dict[int, list[Any]] = {}
    for group, value in zip(_list(group_id), _list(values), strict=True):
        groups.setdefault(group, []).append(value)
    return list(groups.values())


def summarize(
    greedy_rollouts: Rollouts,
    greedy_correct: Sequence[float],
    sampled_rollouts: Rollouts | None = None,
    sampled_correct: Sequence[float] = (),
    sampled_rewards: Sequence[float] = (),
    answers: Sequence[Hashable] = (),
    ks: Iterable[int] = (),
    sampler: TokenSampler | None = None,
) -> dict[str, float]:
    """The `heldout/` metrics. Verdicts, rewards and final answers: one for each row; length and truncation: greedy.

    sampler: of the sampled rollouts; null: an independent one.
    """
    lengths = _list(greedy_rollouts.lengths)
    verdicts = _list(greedy_correct)
    result = {
        "heldout/accuracy": avg_at_k(by_group(greedy_rollouts.group_id, verdicts)),
        "heldout/length_mean": _mean(lengths),
        "heldout/truncated": _mean(reason == "length" for reason in greedy_rollouts.finish_reason),
        "heldout/missing": _mean(isnan(value) for value in [*verdicts, *_list(sampled_correct)]),
    }
    if sampled_rollouts is not None:
        groups = sampled_rollouts.group_id
        correct, rewards = by_group(groups, sampled_correct), by_group(groups, sampled_rewards)
        finals = by_group(groups, answers)
        result[f"heldout/avg@{max(map(len, correct), default=0)}"] = avg_at_k(correct)
        result["heldout/distinct"] = distinct(by_group(groups, sampled_rollouts.text), correct)
        coupled = sampler is not None and not sampler.independent
        designs = _designs(sampled_rollouts) if coupled else []
        for k in ks:
            if not coupled or k == 1:
                result[f"heldout/pass@{k}"] = pass_at_k(correct, k)
                result[f"heldout/best@{k}"] = best_at_k(rewards, k)
                result[f"heldout/maj@{k}"] = maj_at_k(finals, correct, k)
            else:
                sets = [sampler.sets(*design, k) for design in designs]
                if all(sets):
                    result[f"heldout/pass@{k}"] = best_of_sets(correct, sets)
                    result[f"heldout/best@{k}"] = best_of_sets(rewards, sets)
                    if all(len(cell) == 1 for its in sets for cells in its for cell in cells):
                        result[f"heldout/maj@{k}"] = maj_of_sets(finals, correct, sets)
            if coupled:
                result[f"heldout/bound@{k}"] = bound_at_k(correct, k)
    return result


def _designs(rollouts: Rollouts) -> list[tuple[dict[str, list[int]], int]]:
    """What the sampler remembers of each group's rows, and how many there are."""
    columns = {name: by_group(rollouts.group_id, values) for name, values in rollouts.design.items()}
    counts = map(len, by_group(rollouts.group_id, rollouts.sample_id))
    return [({name: groups[i] for name, groups in columns.items()}, count) for i, count in enumerate(counts)]


def evaluate(run: Any) -> dict[str, float]:
    """Greedy and sampled completions of the held-out prompts -> metrics, those of the `evaluate` hook included.

    Uses run.generate and run.score with the tag "eval", whose random streams are apart from those of training.
    The hook sees the sampled completions, or the greedy ones when eval.samples is 0.
    """
    config = run.config.eval
    prompts = list(run.task.heldout[: config.prompts or None])
    if not prompts:
        raise UserError("the task has no held-out prompts: nothing to evaluate on")
    rollouts, rewards = _complete(run, prompts, 1, 0.0)
    greedy = rollouts, verdicts(run, rollouts, rewards)
    if not config.samples:
        result = summarize(*greedy)
    else:
        rollouts, rewards = _complete(run, prompts, config.samples, config.temperature)
        answers = [run.task.final_answer(text) for text in rollouts.text]
        total = [nan] * len(rollouts) if rewards.total is None else rewards.total
        sampler = run.hooks.token_sampler(run=run)
        correct = verdicts(run, rollouts, rewards)
        result = summarize(*greedy, rollouts, correct, total, answers, config.ks, sampler)
        if not sampler.independent:
            run.say(_notice(result, config.ks, config.samples))
    return _merge(result, run.hooks.evaluate(rollouts=rollouts, rewards=rewards, run=run), run)


def _notice(result: Mapping[str, float], ks: Iterable[int], samples: int) -> str:
    """Which estimates are made from coupled samples, and which are left out."""
    missing = [f"{kind}@{k}" for k in ks for kind in ("pass", "best", "maj") if f"heldout/{kind}@{k}" not in result]
    left_out = f"; left out, for want of such subsets of {samples}: {', '.join(missing)}" if missing else ""
    return f"this sampler couples the samples of a prompt: pass@k averages over the subsets that it names{left_out}"


def verdicts(run: Any, rollouts: Rollouts, rewards: Rewards) -> list[float]:
    """[R] 1 right, 0 wrong, NaN unknown, by the first of these that has an opinion of any row:

    the component eval.correct; the verifier of a task that decides (Task.decides); the first component that answers;
    the verifier of another task.
    """
    wanted, components = run.config.eval.correct, rewards.components
    if wanted is not None and wanted not in components:
        raise unknown("reward component in eval.correct", wanted, components)
    verified = [run.task.verify(p, text) for p, text in zip(rollouts.prompts, rollouts.text, strict=True)]
    if wanted:
        values = _list(components[wanted])
    else:
        answers = [_list(column) for column in components.values()]
        order = [verified, *answers] if run.task.decides else [*answers, verified]
        values = next((column for column in order if not all(map(_unknown, column))), verified)
    return [nan if _unknown(value) else float(value >= 1) for value in values]


def _unknown(value: float | None) -> bool:
    return value is None or isnan(value)


def _complete(run: Any, prompts: Sequence[Any], samples: int, temperature: float) -> tuple[Rollouts, Rewards]:
    ids = tuple(range(samples))
    requests = [Request(prompt, group_id=i, sample_ids=ids, tag="eval") for i, prompt in enumerate(prompts)]
    rollouts = run.generate(requests, temperature=temperature)
    return rollouts, run.score(rollouts)


def _merge(result: dict[str, float], answers: Iterable[Mapping[str, float]], run: Any) -> dict[str, float]:
    for answer in answers:
        if same := sorted(result.keys() & answer.keys()):
            plugins = ", ".join(sorted(impl.plugin_name for impl in run.hooks.evaluate.get_hookimpls()))
            raise UserError(
                f"evaluate(): the metric {same[0]!r} is given twice; plugins that answer this hook: {plugins}\n"
                "put the plugin's name in front of its metrics: NAME/metric"
            )
        result = {**result, **{name: float(value) for name, value in answer.items()}}
    return result


def _vote(known: Sequence[tuple[Hashable, bool]], k: int) -> float:
    votes = Counter(name for name, _ in known if name is not None)
    right = Counter(name for name, good in known if good and name is not None)
    silent = len(known) - sum(votes.values())
    terms = []
    for name, good in right.items():
        others = tuple(sorted(count for other, count in votes.items() if other != name))
        terms.append(good / votes[name] * _win_chance(votes[name], others, silent, k))
    return fsum(terms)


def _largest(values: Sequence[float], cells: Iterable[Sequence[int]]) -> float:
    """Expected largest value of one sample from each cell, drawn uniformly and independently."""
    columns = [[values[row] for row in cell] for cell in cells]
    terms, before = [], 0.0
    for value in sorted({value for column in columns for value in column}):
        below = prod(sum(other <= value for other in column) / len(column) for column in columns)
        terms.append(value * (below - before))
        before = below
    return fsum(terms)


@lru_cache(maxsize=65536)
def _win_chance(own: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """Chance that an answer given `own` times wins the vote of k samples, a tie of m counting 1/m; exact.

    For j votes of its own, an answer given fewer than j times can neither beat nor tie it: those are drawn as one pool.
    `ways[votes, ties]` counts the draws from the rest in which none has more than j and `ties` have exactly j.
    """
    chances = []
    for j in range(max(1, k - silent - sum(others)), min(own, k) + 1):
        pool = silent + sum(count for count in others if count < j)
        ways = {(0, 0): 1}
        for count in (count for count in others if count >= j):
            drawn: dict[tuple[int, int], int] = {}
            for (used, ties), number in ways.items():
                for votes in range(min(j, k - j - used) + 1):
                    key = used + votes, ties + (votes == j)
                    drawn[key] = drawn.get(key, 0) + number * comb(count, votes)
            ways = drawn
        subsets = comb(own + silent + sum(others), k)
        chances += [
            comb(own, j) * number * comb(pool, k - j - used) / subsets / (1 + ties)
            for (used, ties), number in ways.items()
        ]
    return fsum(chances)


@lru_cache(maxsize=256)
def best_weights(n: int, k: int) -> tuple[float, ...]:
    """Chance that the i-th smallest of n is the largest of a subset of k. Integers divide exactly at any size."""
    return tuple(comb(i - 1, k - 1) / comb(n, k) for i in range(1, n + 1))


def _verdicts(correct: Iterable[Iterable[float]]) -> list[list[bool]]:
    return [[value >= 1 for value in row if not isnan(value)] for row in _rows(correct)]


def _rows(values: Iterable[Iterable[Any]]) -> list[list[Any]]:
    return [_list(row) for row in _list(values)]


def _list(values: Iterable[Any]) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return fsum(values) / len(values) if values else nan
