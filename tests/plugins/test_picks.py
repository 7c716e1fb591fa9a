"""reward=picks: matrices and numbers of completions, and what a pool of answers is worth."""

import pytest
import torch
from grpozoo_plugins.picks import Picks
from hypothesis import given
from hypothesis import strategies as st
from reward_rows import rewards_of, rows

from grpozoo import Prompt
from grpozoo.evaluate import best_at_k
from grpozoo.rewards.answers import _uniform, worth
from grpozoo.testing import Context, check_plugin, compose


def prompt(m, digits="314159", name=""):
    return Prompt(digits + name, text="?", extra={"digits": digits, "answers": m, "collinear": False})


def test_conformance():
    check_plugin("picks", "reward=picks", "task=digit_picks")


def test_numbers_and_matrices():
    """136 of 314159: 3 4 9, two odd, sum 16, 1 1 left small: (2/3, 1/3, 16/27, 2/27), mean .4166667. 156: 3 5 9."""
    m3 = prompt(3)
    rollouts = rows(["<1>136<2>13<3>156", "nothing", "<2>136"], prompts=[m3, m3, m3])
    plugin = Picks(Picks.Config())
    rewards = rewards_of({"picks": plugin}, rollouts)
    first, second, third = rewards.vectors["picks_answers"]
    assert first.tolist() == [
        pytest.approx([2 / 3, 1 / 3, 16 / 27, 2 / 27]),
        pytest.approx([1, 0, 17 / 27, 6 / 27]),  # 1 4 1 are left
    ]
    assert second.shape == (0, 4) and third.tolist() == [first[0].tolist()]
    expected = [(1 + 23 / 27) / 4, 0.0, (1 + 18 / 27) / 4]
    assert rewards.components["picks"].tolist() == pytest.approx(expected)
    assert [entry for entry in plugin.logged] == [
        ("picks/well_formed", pytest.approx(share), 3.0) for share in (2 / 3, 0, 1 / 3)
    ]


def test_a_prompt_of_another_task_has_no_reward():
    rollouts = rows(["156", "156"], prompts=[prompt(1), Prompt("other", text="?")])
    rewards = rewards_of({"picks": Picks(Picks.Config())}, rollouts)
    assert rewards.components["picks"].isnan().tolist() == [False, True]
    assert rewards.vectors["picks_answers"][1].isnan().all()
    for task, said in (("digit_picks", False), ("arithmetic", True)):
        config, active = compose("reward=picks", f"task={task}")
        notices = active.hooks.validate(config=config, active=active)
        assert any("task=digit_picks" in notice for notice in notices if notice) == said


def test_a_pool_of_answers():
    """Scalars .1 .5 .5 .9 .2 and one that is missing: best@1, 2 and 6 of the method sheet."""
    values = [0.1, 0.5, 0.5, 0.9, 0.2]
    matrices = [torch.tensor([[v, v] for v in part], dtype=torch.float64) for part in (values[:3], values[3:])]
    rollouts = rows(["", ""])  # one group
    target = torch.full((2,), 0.5, dtype=torch.float64)
    found = worth(rollouts, matrices, target, 3)
    assert found["best@1"] == pytest.approx(0.366667, abs=1e-6)
    assert found["best@2"] == pytest.approx(0.566667, abs=1e-6)
    assert found["best@6"] == pytest.approx(0.9)
    ks = (1, 2, 4, 6)
    assert set(found) == {f"{name}@{k}" for name in ("best", "coverage") for k in ks} | {"diversity"}
    assert all(found[f"coverage@{k}"] == pytest.approx(found[f"best@{k}"]) for k in ks)  # components that agree


def test_coverage_is_the_best_for_weights_that_nobody_knows():
    """(1,0), (0,1), (.6,.6): E max(w, 1-w, .6) = .76 for w uniform on [0, 1]; (.6,.6) alone is worth .6 whatever w."""
    M = torch.tensor([[1, 0], [0, 1], [0.6, 0.6]], dtype=torch.float64)
    target = torch.full((2,), 0.5, dtype=torch.float64)
    found = worth(rows([""]), [M], target, 3)
    assert found["coverage@3"] == pytest.approx(0.76, abs=0.01) and found["best@3"] == pytest.approx(0.6)
    twice = worth(rows([""]), [M[2:].repeat(2, 1)], target, 2)
    assert twice["coverage@1"] == twice["coverage@2"] == pytest.approx(0.6)


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=6), st.integers(0, 2))
def test_coverage_is_best_at_k_for_each_of_the_weights(lines, missing):
    M, target = torch.tensor(lines, dtype=torch.float64), torch.full((3,), 1 / 3, dtype=torch.float64)
    found = worth(rows([""]), [M], target, len(M) + missing)
    columns = [[*(M @ w).tolist(), *[0.0] * missing] for w in _uniform(3)]
    for k in (1, len(M) + missing):
        assert found[f"coverage@{k}"] == pytest.approx(best_at_k(columns, k), abs=1e-12)
        assert found[f"best@{k}"] == pytest.approx(best_at_k([[*M.mean(1).tolist(), *[0.0] * missing]], k), abs=1e-12)


def test_the_diversity_of_a_pool():
    """L1 distances 2, 1.4, 1.4 and so on: {(1,0,0), (0,1,0), (.6,.6,.6)}: 2, 1.6, 1.6."""
    M = torch.tensor([[1, 0, 0], [0, 1, 0], [0.6, 0.6, 0.6]], dtype=torch.float64)
    gone = torch.full((1, 3), torch.nan, dtype=torch.float64)
    target = torch.full((3,), 1 / 3, dtype=torch.float64)
    assert worth(rows([""]), [M], target, 3)["diversity"] == pytest.approx(1.733333, abs=1e-6)
    assert worth(rows(["", ""]), [M, gone], target, 3)["diversity"] == pytest.approx(1.733333, abs=1e-6)
    assert worth(rows(["", ""]), [M[:1], M[:0]], target, 3)["diversity"] == 0.0


def test_one_answer_to_a_completion_and_several_are_compared_at_equal_counts():
    """Six completions of one answer, two of three: the same pool."""
    texts = ["136", "156", "16", "234", "456", "123"]
    packed = ["".join(f"<{i}>{text}" for i, text in enumerate(part, 1)) for part in (texts[:3], texts[3:])]
    plugin = Picks(Picks.Config())
    found = []
    for rollouts in (rows(texts, prompts=[prompt(1)] * 6), rows(packed, prompts=[prompt(3)] * 2)):
        found.append(plugin.evaluate(rollouts=rollouts, rewards=rewards_of({"picks": plugin}, rollouts)))
    assert found[0] == pytest.approx(found[1]) and "picks/best@6" in found[0]


def test_grpo_trains_on_the_number():
    run = Context(*compose("reward=picks", "task=digit_picks"))
    rewards = run.score(rows(["156", "234"], prompts=[prompt(1)] * 2))
    assert rewards.total.tolist() == rewards.components["picks"].tolist()
