"""ReMax: what it asks the engine for, and the rewards less those of the greedy completions."""

from types import SimpleNamespace

import torch
from group_steps import step_of
from grpozoo_plugins.remax import Remax

from grpozoo.testing import check_plugin, fixture

BASELINE_IS_NOT_THE_GROUP = ("equal rewards", "singleton")  # all siblings may be better than greedy, also a single one


def test_conformance():
    check_plugin("remax", "algo=remax", skip=BASELINE_IS_NOT_THE_GROUP)


class Engine:
    """Greedy completions of 3 tokens whose rewards are given by prompt."""

    def __init__(self, rewards):
        self.rewards, self.asked = rewards, []

    def generate(self, requests, temperature=None):
        self.asked.append((requests, temperature))
        return SimpleNamespace(prompts=[r.prompt for r in requests], lengths=torch.full((len(requests),), 3))

    def score(self, rollouts):
        totals = [self.rewards[prompt.id] for prompt in rollouts.prompts]
        return SimpleNamespace(total=torch.tensor(totals, dtype=torch.float64))


def answer(engine, step):
    plugin = Remax(Remax.Config())
    plugin.name = "remax"
    return plugin, plugin.advantage(rollouts=step.rollouts, rewards=step.rewards, run=engine).tolist()


def test_advantages_of_the_worked_example():
    """Rewards 1 0 0 1 | 0 .5 1 0; greedy completions get 1 and .25."""
    engine = Engine({"p0": 1.0, "p1": 0.25})
    plugin, found = answer(engine, fixture())
    assert found == [0, -1, -1, 0, -0.25, 0.25, 0.75, -0.25]
    assert plugin.logged == [("remax/greedy_reward", 0.625, 2.0), ("remax/greedy_tokens", 6.0, 1.0)]


def test_one_greedy_completion_per_group_under_a_tag_of_its_own():
    engine = Engine({"p7": 0.0, "p-2": 1.0})
    answer(engine, step_of([1, 0, 1, 0], [7, -2, 7, -2]))
    ((requests, temperature),) = engine.asked
    assert temperature == 0.0
    asked = {(r.prompt.id, r.group_id, r.sample_ids, r.tag, r.policy) for r in requests}
    assert asked == {("p7", 7, (0,), "remax", "policy"), ("p-2", -2, (0,), "remax", "policy")}
    assert len(requests) == 2


def test_equal_rewards_are_compared_with_greedy_and_not_with_each_other():
    assert answer(Engine({"p0": 0.0}), step_of([1, 1, 1]))[1] == [1, 1, 1]


def test_without_a_reward_of_the_row_or_of_the_greedy_completion_the_advantage_is_0():
    plugin, found = answer(Engine({"p0": 0.25, "p1": float("nan")}), step_of([1, None, 1, 0], [0, 0, 1, 1]))
    assert found == [0.75, 0, 0, 0]
    assert plugin.logged[0] == ("remax/greedy_reward", 0.25, 1.0)
    plugin, found = answer(Engine({"p0": float("nan")}), step_of([1, 0]))
    assert found == [0, 0]
    assert plugin.logged[0][2] == 0.0  # nothing to average
