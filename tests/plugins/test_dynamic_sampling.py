"""Dynamic sampling: every trained group is mixed, none is split, as many as asked for, up to the limit of rounds."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runs import digest, metrics, train

from grpozoo import Request, UserError
from grpozoo.testing import Context, check_plugin, compose

VERDICT = {"0": 0.0, "1": 1.0, "?": float("nan")}


def test_conformance():
    assert "resample" in check_plugin("dynamic_sampling", "algo=dynamic_sampling")


class Scripted(Context):
    """The groups come out as a plan says, one character for each completion: right, wrong, unknown."""

    def __init__(self, config, active, plan):
        super().__init__(config, active)
        self.plan, self.drawn, self.asked = list(plan), 0, []  # asked: prompts of each call

    def generate(self, requests, temperature=None):
        self.asked.append(len(requests))
        texts = []
        for request in requests:
            group = self.plan[self.drawn] if self.drawn < len(self.plan) else "0" * len(request.sample_ids)
            self.drawn += 1
            texts += group
        return replace(super().generate(requests), text=tuple(texts))

    def verdicts(self, rollouts, rewards):
        return torch.tensor([VERDICT[text] for text in rollouts.text], dtype=torch.float64)


@cache
def composition():
    return compose("algo=dynamic_sampling")


def composed(groups, size):
    config, active = composition()
    return replace(config, prompts_per_step=groups, group_size=size), active


def sampled(plan, groups, size, shuffle=None, **options):
    """(rollouts, rewards, run, plugin) after resample; plan: the verdicts of each group that is generated."""
    config, active = composed(groups, size)
    plugin = active.plugins["dynamic_sampling"]
    plugin.config, plugin.logged = plugin.Config(**options), []
    run = Scripted(config, active, plan)
    rollouts = run.generate([Request(p, g, tuple(range(size))) for g, p in enumerate(run.prompts(groups))])
    rollouts = rollouts.select(shuffle(list(range(len(rollouts)))) if shuffle else range(len(rollouts)))
    rollouts, rewards = active.hooks.resample(rollouts=rollouts, rewards=run.score(rollouts), run=run)
    return rollouts, rewards, run, {name.split("/")[1]: value for name, value, _ in plugin.logged}


def groups_of(rollouts):
    """The verdicts of each group, samples in order, groups in the order in which they stand."""
    found = {}
    for row, (group, sample) in enumerate(zip(rollouts.group_id.tolist(), rollouts.sample_id.tolist(), strict=True)):
        found.setdefault(group, {})[sample] = rollouts.text[row]
    return {group: "".join(texts[s] for s in sorted(texts)) for group, texts in found.items()}


def test_a_worked_step():
    """Three wanted, groups 1 and 3 are mixed, of the next three 4 (not 3: all right) and 6, which is too many."""
    rollouts, rewards, run, logged = sampled(["1100", "0000", "0001", "1111", "1000", "0111"], 3, 4)
    assert groups_of(rollouts) == {0: "1100", 2: "0001", 4: "1000"}
    assert len(rollouts) == len(rewards.total) == 12 and run.asked == [3, 3]
    assert logged == {"kept": 4 / 6, "rounds": 2, "extra": 12, "missing": 0} and not run.said
    assert len({prompt.id for prompt in rollouts.prompts}) == 3


def test_a_full_batch_costs_nothing():
    rollouts, _, run, logged = sampled(["10", "01", "10"], 3, 2)
    assert list(groups_of(rollouts)) == [0, 1, 2] and run.asked == [3]
    assert logged == {"kept": 1, "rounds": 1, "extra": 0, "missing": 0}


def test_unknown_verdicts_leave_their_group_and_a_single_answer_is_kept():
    plan = ["1???", "11??", "10??", "????"]
    assert list(groups_of(sampled(plan, 4, 4, max_rounds=1)[0]).values()) == ["1???", "10??"]


def test_the_filter_is_the_accuracy_not_the_reward():
    """All right with different rewards is dropped, right and wrong with equal rewards is kept (sheet 3.9)."""
    config, active = composed(2, 2)
    run = Scripted(config, active, ["11", "10"])
    rollouts = run.generate([Request(p, g, (0, 1)) for g, p in enumerate(run.prompts(2))])
    rewards = replace(run.score(rollouts), total=torch.tensor([1.0, 0.3, 0.5, 0.5]).double())
    active.plugins["dynamic_sampling"].config.max_rounds = 1
    kept, scored = active.hooks.resample(rollouts=rollouts, rewards=rewards, run=run)
    assert "missing" in run.said[0] and kept.text == ("1", "0") and scored.total.tolist() == [0.5, 0.5]


def test_the_limit_is_kept_and_said():
    """Peers B17: refill up to a stated limit, then say so."""
    rollouts, _, run, logged = sampled(["10"], 4, 2, max_rounds=3, prompts_per_round=5)
    assert groups_of(rollouts) == {0: "10"} and run.asked == [4, 5, 5]
    assert logged == {"kept": 1 / 14, "rounds": 3, "extra": 20, "missing": 3}
    assert len(run.said) == 1 and "3 rounds (max_rounds) do not always fill 4 groups" in run.said[0]


def test_nothing_to_keep_leaves_the_batch_as_it_was():
    rollouts, rewards, _, logged = sampled(["11", "00"], 2, 2, max_rounds=2)
    assert groups_of(rollouts) == {0: "11", 1: "00"} and len(rewards.total) == 4
    assert logged["missing"] == 2 and logged["kept"] == 0


def test_the_limit_as_an_error():
    from grpozoo_plugins.dynamic_sampling import OnLimit

    with pytest.raises(UserError, match=r"after 2 rounds .* 1 of 4 groups have right and wrong"):
        sampled(["10"], 4, 2, max_rounds=2, on_limit=OnLimit.error)
    assert len(sampled(["10"] * 4, 4, 2, max_rounds=1, on_limit=OnLimit.error)[0]) == 8


def expected(plan, groups, size, max_rounds, per_round):
    """(kept groups, rounds) by the definition, group by group."""
    plan = plan + ["0" * size] * (groups + max_rounds * (per_round or groups))
    ids, seen, count = [], 0, groups
    rounds = 0
    while len(ids) < groups and rounds < max_rounds:
        for group in range(seen, seen + count):
            known = plan[group].replace("?", "")
            if len(known) == 1 or len(set(known)) == 2:
                ids.append(group)
        seen, count, rounds = seen + count, per_round or groups, rounds + 1
    return ids[:groups], rounds, seen


@given(
    st.integers(1, 4),
    st.integers(1, 4).flatmap(lambda n: st.lists(st.text("01?", min_size=n, max_size=n), min_size=1, max_size=30)),
    st.integers(1, 5),
    st.none() | st.integers(1, 6),
    st.randoms(),
)
@settings(max_examples=60, deadline=None)
def test_trained_groups_are_mixed_whole_and_as_many_as_asked_for(groups, plan, max_rounds, per_round, random):
    """Sheet section 7, property 10, for groups of any size whose rows arrive in any order."""
    size = len(plan[0])

    def shuffle(rows):
        by_group = [rows[start : start + size] for start in range(0, len(rows), size)]
        inner = [random.sample(rows, size) for rows in by_group]
        return [rows[i] for i in range(size) for rows in inner]  # interleaved, in the order of the groups

    rollouts, rewards, run, logged = sampled(
        plan, groups, size, shuffle, max_rounds=max_rounds, prompts_per_round=per_round
    )
    kept, rounds, seen = expected(plan, groups, size, max_rounds, per_round)
    assert logged["rounds"] == rounds == len(run.asked) and run.drawn == seen
    assert logged["extra"] == (seen - groups) * size and logged["missing"] == groups - len(kept)
    assert bool(run.said) == (len(kept) < groups)
    found = groups_of(rollouts)
    assert list(found) == (kept or list(range(groups)))
    assert all(len(texts) == size for texts in found.values()) and len(rollouts) == len(rewards.total)
    assert all((plan[group : group + 1] or ["0" * size]) == [found[group]] for group in kept)


@pytest.mark.parametrize("option", ["max_rounds=0", "prompts_per_round=0", "on_limit=stop"])
def test_options_out_of_range_are_refused(option):
    with pytest.raises(UserError, match=option.split("=")[0]):
        compose("algo=dynamic_sampling", f"plugins.dynamic_sampling.{option}")


def test_groups_of_one_are_told_that_nothing_happens():
    config, active = compose("algo=dynamic_sampling", "group_size=1")
    assert [note for note in active.hooks.validate(config=config, active=active) if note] == [
        "dynamic_sampling does nothing with group_size=1: a single completion is always kept"
    ]
    config, active = composed(2, 2)
    assert not any(active.hooks.validate(config=config, active=active))


def test_a_run_trains_on_mixed_groups_only_and_resumes_bit_for_bit(tmp_path):
    """A random policy whose first character is a digit about half of the time, pairs: half of the groups are mixed."""
    score = tmp_path / "score.py"
    score.write_text("def digit(completion):\n    return float(completion[:1].isdigit())\n")
    overrides = [
        "algo=dynamic_sampling", "group_size=2", "update.mini_batches=2", "logger.completions=-1", "lr=1e-3",
        "eval.correct=function", f"plugins.function.path={score}:digit",
    ]  # fmt: skip
    train(tmp_path / "run", *overrides, "steps=4")
    groups = Counter()
    for line in map(json.loads, (tmp_path / "run" / "completions.jsonl").read_text().splitlines()):
        groups[line["step"], line["group_id"], line["completion"][:1].isdigit()] += 1
    assert len(groups) == 4 * 4 * 2 and set(groups.values()) == {1}  # 4 steps of 4 groups, one right and one wrong each
    steps = [line for line in metrics(tmp_path / "run") if "dynamic_sampling/kept" in line]
    assert all(line["groups/mixed"] == 1 and line["dynamic_sampling/missing"] == 0 for line in steps)
    assert max(line["dynamic_sampling/extra"] for line in steps) > 0
    train(tmp_path / "parts", *overrides, "steps=2")
    train(tmp_path / "parts", *overrides, "steps=4", f"resume={tmp_path / 'parts'}")
    assert digest(tmp_path / "parts") == digest(tmp_path / "run")
    assert metrics(tmp_path / "parts")[-1] == metrics(tmp_path / "run")[-1]
