"""Estimators against enumeration of all subsets, and what the evaluation pass asks of a run."""

from dataclasses import replace
from itertools import combinations, product
from math import isnan, nan
from types import SimpleNamespace

import pluggy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpozoo import Prompt, Rewards, Rollouts, UserError, hookimpl, hooks
from grpozoo.evaluate import (
    avg_at_k,
    best_at_k,
    best_of_sets,
    bound_at_k,
    evaluate,
    group_shares,
    maj_at_k,
    maj_of_sets,
    pass_at_k,
    summarize,
)
from grpozoo.metrics import describe
from grpozoo.sampling import TokenSampler
from grpozoo.tasks import Task

SAMPLES = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(-3, 3)), min_size=1, max_size=8)


def every(values, k):
    return list(combinations(values, k))


@pytest.mark.parametrize(("k", "expected"), [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)])
def test_one_right_of_four_gives_k_quarters(k, expected):
    """1 - C(3, k) / C(4, k); drawing with replacement would give 0.4375 for k = 2 and 0.684 for k = 4."""
    verdicts = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    assert pass_at_k(verdicts, k) == expected
    assert best_at_k(verdicts, k) == pytest.approx(expected, abs=1e-15)


def test_best_at_2_of_three_rewards():
    """Subsets of {1, 2, 4}: maxima 2, 4, 4."""
    assert best_at_k([[4.0, 1.0, 2.0]], 2) == pytest.approx(10 / 3, abs=1e-15)


def test_a_thousand_samples_neither_overflow_nor_lose_digits():
    """1 - C(1023, 512) / C(1024, 512) = 1/2; best of 512 of 1..1024 is 512 * 1025 / 513."""
    assert pass_at_k([[1] + [0] * 1023], 512) == 0.5
    assert best_at_k([range(1, 1025)], 512) == pytest.approx(512 * 1025 / 513, rel=1e-13)
    assert maj_at_k([["a"] * 513 + ["b"] * 511], [[1.0] * 513 + [0.0] * 511], 1024) == 1.0


@given(SAMPLES, st.data())
def test_estimators_are_the_mean_over_all_subsets(samples, data):
    k = data.draw(st.integers(1, len(samples)))
    rewards = [float(reward) for _, reward in samples]
    right = [float(name == "a") for name, _ in samples]
    subsets = every(range(len(samples)), k)

    def vote(subset):
        counts = {name: sum(samples[i][0] == name for i in subset) for name in "abc"}
        top = max(counts.values())
        winners = [name for name, count in counts.items() if count == top > 0]
        return winners.count("a") / len(winners) if winners else 0.0

    def mean(values):
        return pytest.approx(sum(values) / len(subsets), abs=1e-12)

    names = [name for name, _ in samples]
    assert best_at_k([rewards], k) == mean(max(rewards[i] for i in subset) for subset in subsets)
    assert pass_at_k([right], k) == mean(any(right[i] for i in subset) for subset in subsets)
    assert maj_at_k([names], [right], k) == mean(map(vote, subsets))


@given(st.lists(st.booleans(), min_size=3, max_size=9), st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(right, random):
    verdicts = [float(value) for value in right]
    names = ["r" if value else f"w{i % 2}" for i, value in enumerate(right)]
    order = list(range(len(right)))
    random.shuffle(order)
    shuffled = [verdicts[i] for i in order], [names[i] for i in order]
    assert pass_at_k([verdicts], 3) == pass_at_k([shuffled[0]], 3)
    assert maj_at_k([names], [verdicts], 3) == pytest.approx(maj_at_k([shuffled[1]], [shuffled[0]], 3), abs=1e-12)


def test_a_tie_shares_the_credit():
    """Votes of all four: 7 twice (right), 8 twice (wrong)."""
    assert maj_at_k([["7", "8", "7", "8"]], [[1, 0, 1, 0]], 4) == pytest.approx(0.5, abs=1e-15)


def test_a_missing_final_answer_takes_a_place_and_casts_no_vote():
    """Pairs of {7, None, None}: two hold the 7, which wins alone; in the third nobody votes."""
    assert maj_at_k([["7", None, None]], [[1, 0, 0]], 2) == pytest.approx(2 / 3, abs=1e-15)
    assert maj_at_k([[None, None]], [[1, 1]], 1) == 0


def test_samples_without_a_verdict_leave_n_and_short_prompts_leave_the_mean():
    verdicts = [[1.0, nan, 0.0], [0.0, 0.0, 0.0], [nan, nan, 1.0]]
    assert pass_at_k(verdicts, 1) == pytest.approx((0.5 + 0 + 1) / 3, abs=1e-15)
    assert pass_at_k(verdicts, 2) == pytest.approx((1 + 0) / 2, abs=1e-15)  # the third prompt has one sample left
    assert best_at_k([[3.0, nan, 1.0]], 2) == 3.0
    assert maj_at_k([["x", "y", "x"]], [[1.0, nan, 1.0]], 2) == 1.0
    assert isnan(pass_at_k(verdicts, 4))


def test_prompts_weigh_equally_whatever_their_number_of_samples():
    assert avg_at_k([[1.0], [0.0, 0.0, 0.0]]) == 0.5
    assert avg_at_k(torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)) == 0.75


def test_groups_all_right_and_all_wrong_are_counted_apart():
    shares = group_shares([1, 0, 1, 0, 0, nan, nan], torch.tensor([5, 9, 5, 9, 2, 2, 7]))
    assert shares["groups/all_right"] == pytest.approx(1 / 3, abs=1e-15)  # group 5; group 7 has no verdict
    assert shares["groups/all_wrong"] == pytest.approx(2 / 3, abs=1e-15)
    assert shares["groups/mixed"] == pytest.approx(0, abs=1e-15)


def rollouts(prompts, groups, samples, texts, finish=None):
    rows, width = len(texts), max(map(len, texts))
    mask = torch.arange(width) < torch.tensor([[len(text)] for text in texts])
    return Rollouts(
        prompts=tuple(prompts[group] for group in groups),
        group_id=torch.tensor(groups),
        sample_id=torch.tensor(samples),
        prompt_ids=((1,),) * rows,
        completion_ids=torch.ones(rows, width, dtype=torch.int64),
        completion_mask=mask,
        logprobs=torch.zeros(rows, width),
        finish_reason=tuple(finish or ["stop"] * rows),
        text=tuple(texts),
        tag=("eval",) * rows,
        policy=("policy",) * rows,
    )


class Sums(Task):
    def __init__(self):
        texts = {"1+1=": "2", "1+2=": "3", "9+9=": "18"}
        self.heldout = [Prompt(f"p{i}", text, answer=texts[text]) for i, text in enumerate(texts)]

    def verify(self, prompt, completion):
        return float(completion == prompt.answer)


class Sampled:
    """Which sampler the samples come from."""

    def __init__(self, sampler):
        self.sampler = sampler

    @hookimpl
    def token_sampler(self):
        return self.sampler


class Run:
    """Greedy answers are right for p0 only; of four samples p0 has 2, 2, 3, 3 and p1 has 3, 4, 5, 6."""

    def __init__(self, *plugins, components=("answer",), sampler=None, **options):
        self.task, self.calls, self.components, self.said = Sums(), [], components, []
        self.say = self.said.append
        options = {"prompts": 2, "samples": 4, "ks": [1, 2, 4], "correct": None, "temperature": 0.7} | options
        self.config = SimpleNamespace(eval=SimpleNamespace(**options))
        manager = pluggy.PluginManager("grpozoo")
        manager.add_hookspecs(hooks)
        for plugin in (Sampled(sampler or TokenSampler()), *plugins):
            manager.register(plugin, type(plugin).__name__.lower())
        self.hooks = manager.hook

    def generate(self, requests, temperature):
        self.calls.append((requests, temperature))
        sampled = {"p0": ["2", "2", "3", "3"], "p1": ["3", "4", "5", "6"]}
        answers = sampled if temperature else {"p0": ["2"], "p1": ["12"]}
        rows = [(r.group_id, s, answers[r.prompt.id][s]) for r in requests for s in r.sample_ids]
        groups, samples, texts = map(list, zip(*rows, strict=True))
        finish = ["length" if len(text) > 1 else "stop" for text in texts]
        return rollouts(self.task.heldout, groups, samples, texts, finish)

    def score(self, rows):
        right = torch.tensor([self.task.verify(p, t) for p, t in zip(rows.prompts, rows.text, strict=True)]).double()
        every = {"format": torch.full_like(right, nan), "answer": right, "half": right / 2}
        components = {name: every[name] for name in self.components}
        return Rewards(components, dict.fromkeys(components, 1.0), total=2 * right)


def test_evaluation_asks_for_greedy_and_sampled_and_reports_both():
    run = Run()
    result = evaluate(run)
    (greedy, cold), (sampled, warm) = run.calls
    assert (cold, warm) == (0.0, 0.7)
    assert [r.sample_ids for r in greedy] == [(0,)] * 2 and [r.sample_ids for r in sampled] == [(0, 1, 2, 3)] * 2
    assert {r.tag for r in greedy + sampled} == {"eval"} and [r.group_id for r in sampled] == [0, 1]
    assert result == pytest.approx(
        {
            "heldout/accuracy": 0.5,
            "heldout/length_mean": 1.5,  # "2" and "12"
            "heldout/truncated": 0.5,
            "heldout/missing": 0.0,
            "heldout/avg@4": (2 / 4 + 1 / 4) / 2,
            "heldout/distinct": 1.0,  # "2" and "3"
            "heldout/pass@1": 0.375,
            "heldout/best@1": 0.75,  # the total is twice the verdict
            "heldout/maj@1": 0.375,
            "heldout/pass@2": (5 / 6 + 1 / 2) / 2,  # 1 - C(2,2)/C(4,2) and 1 - C(3,2)/C(4,2)
            "heldout/best@2": 5 / 6 + 1 / 2,
            "heldout/maj@2": (1 / 6 + 4 / 6 / 2 + 3 / 6 / 2) / 2,  # p0: both right, or one (half); p1: one (half)
            "heldout/pass@4": 1.0,
            "heldout/best@4": 2.0,
            "heldout/maj@4": (1 / 2 + 1 / 4) / 2,  # ties of two and of four
        },
        abs=1e-12,
    )
    assert all(describe(name) for name in result)


def test_no_samples_means_greedy_only_and_zero_prompts_means_all():
    run = Run(samples=0)
    assert not [name for name in evaluate(run) if "@" in name] and len(run.calls) == 1
    run = Run(prompts=0, samples=0)
    with pytest.raises(KeyError, match="p2"):  # the third prompt is asked too
        evaluate(run)


def test_the_verdict_is_the_named_component_or_the_first_that_answers_or_the_verifier():
    assert evaluate(Run(components=("format", "answer")))["heldout/accuracy"] == 0.5
    assert evaluate(Run(components=("answer", "half"), correct="half"))["heldout/accuracy"] == 0.0  # 0.5 is not right
    assert evaluate(Run(components=("format",)))["heldout/accuracy"] == 0.5
    assert evaluate(Run(components=("format", "answer"), correct="format"))["heldout/missing"] == 1.0
    undecided = Run(components=("half",))
    undecided.task.decides = False  # rows of the user's own: the chosen reward counts, and 0.5 is not right
    assert evaluate(undecided)["heldout/accuracy"] == 0.0
    with pytest.raises(UserError, match="'anser', did you mean 'answer'"):
        evaluate(Run(correct="anser"))


def test_hook_results_are_merged_and_equal_names_refused():
    class Longest:
        @hookimpl
        def evaluate(self, rollouts, rewards, run):
            return {"longest/rows": len(rollouts)}

    class Second:
        @hookimpl
        def evaluate(self, rollouts):
            return {"longest/rows": 1}

    assert evaluate(Run(Longest()))["longest/rows"] == 8.0
    with pytest.raises(UserError, match="'longest/rows' is given twice.*longest, second"):
        evaluate(Run(Longest(), Second()))


def test_evaluation_draws_no_random_number():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    evaluate(Run())
    assert torch.equal(before, torch.get_rng_state())


def test_rows_are_grouped_by_id_not_by_position():
    prompts = [Prompt("a", "a"), Prompt("b", "b")]
    rows = rollouts(prompts, [1, 0, 1, 0], [0, 0, 1, 1], ["x"] * 4)
    result = summarize(rows, [0, 1, 0, 1], rows, [0, 1, 0, 1], [0, 1, 0, 1], ["x"] * 4, [2])
    assert result["heldout/pass@2"] == 0.5


# Samples that a token sampler couples


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@given(st.lists(st.lists(st.integers(-2, 3), min_size=1, max_size=3), min_size=1, max_size=4))
def test_best_of_cells_is_the_mean_over_all_ways_to_take_one_from_each(cells):
    values = [float(value) for cell in cells for value in cell]
    places = iter(range(len(values)))
    numbered = [[next(places) for _ in cell] for cell in cells]
    expected = mean(max(map(float, chosen)) for chosen in product(*cells))
    assert best_of_sets([values], [[numbered]]) == pytest.approx(expected, abs=1e-12)


def test_sets_are_averaged_and_prompts_weigh_equally():
    sets = [[[[0], [2]], [[1], [3]]], [[[0, 1], [2, 3]]]]
    assert best_of_sets([[1, 0, 0, 0], [1, 0, 1, 0]], sets) == pytest.approx((1 / 2 + 3 / 4) / 2, abs=1e-15)
    assert maj_of_sets([["a", "b", "a", None]], [[1, 0, 1, 0]], sets[:1]) == 0.5  # a a: right; b alone: wrong


def test_a_coupled_group_with_a_hole_counts_for_one_sample_only():
    sets = [[[[0], [1]]]] * 2
    assert (
        best_of_sets([[1, nan], [0, 0]], sets) == 0.0 and maj_of_sets([["a", "a"]] * 2, [[1, nan], [0, 0]], sets) == 0
    )
    assert isnan(best_of_sets([[1, nan]], sets[:1]))


def test_the_bound_is_the_mean_over_prompts_of_k_times_their_accuracy_at_most_1():
    assert bound_at_k([[1, 0, 0, 0], [1, 1, 0, nan], [nan, nan]], 2) == pytest.approx((0.5 + 1) / 2, abs=1e-15)


class Halves(TokenSampler):
    """Two of four samples: the first and the third, or the second and the fourth."""

    independent = False

    def sets(self, design, count, m):
        assert design == {} and count == 4
        return [[[0], [2]], [[1], [3]]] if m == 2 else super().sets(design, count, m)


def test_pass_at_k_of_coupled_samples_is_over_the_sets_of_their_sampler():
    """p0 answers 2 2 3 3, p1 3 4 5 6: of each prompt's two halves one is right, or both."""
    run = Run(sampler=Halves(), ks=[1, 2, 3, 4])
    result = {
        name: value
        for name, value in evaluate(run).items()
        if name.split("@")[0].endswith(("pass", "best", "maj", "bound"))
    }
    assert result == pytest.approx(
        {
            "heldout/pass@1": 0.375, "heldout/best@1": 0.75, "heldout/maj@1": 0.375, "heldout/bound@1": 0.375,
            "heldout/pass@2": (1 + 1 / 2) / 2, "heldout/best@2": 1 + 1 / 2, "heldout/maj@2": (1 / 2 + 1 / 4) / 2,
            "heldout/bound@2": (1 + 1 / 2) / 2,
            "heldout/bound@3": (1 + 3 / 4) / 2,
            "heldout/pass@4": 1.0, "heldout/best@4": 2.0, "heldout/maj@4": (1 / 2 + 1 / 4) / 2, "heldout/bound@4": 1.0,
        },
        abs=1e-12,
    )  # fmt: skip
    (said,) = run.said
    assert "couples" in said and said.endswith("pass@3, best@3, maj@3")


def test_a_vote_is_left_out_where_cells_hold_several_samples():
    class Strata(Halves):
        def sets(self, design, count, m):
            return [[[0, 1], [2, 3]]]

    run = Run(sampler=Strata(), ks=[2])
    result = evaluate(run)
    assert "heldout/maj@2" not in result and result["heldout/pass@2"] == pytest.approx((1 + 1 / 2) / 2, abs=1e-12)
    assert run.said[0].endswith(": maj@2")


def test_what_the_sampler_remembers_reaches_it_group_by_group():
    seen = []

    class Spy(Halves):
        def sets(self, design, count, m):
            seen.append((design, count))
            return []

    prompts = [Prompt("a", "a"), Prompt("b", "b")]
    rows = rollouts(prompts, [1, 0, 1, 0], [0, 0, 1, 1], ["x"] * 4)
    rows = replace(rows, design={"index": torch.tensor([5, 6, 7, 8])})
    summarize(rows, [0] * 4, rows, [0] * 4, [0] * 4, ["x"] * 4, [2], Spy())
    assert seen == [({"index": [5, 7]}, 2), ({"index": [6, 8]}, 2)]


def test_independent_samples_say_nothing_and_have_no_bound():
    run = Run()
    assert not [name for name in evaluate(run) if "bound" in name] and not run.said
