"""Optimizer steps: what they are made of, and that no way of splitting the work changes them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runs import difference, metrics, one_thread, train  # noqa: F401

import grpozoo.update
from grpozoo import ops
from grpozoo.config import Optim, Schedule
from grpozoo.cycle import minibatches
from grpozoo.packing import pack, share
from grpozoo.testing import example
from grpozoo.update import learning_rate

ROWS = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.floats(-3, 3), min_size=0, max_size=6)), min_size=1, max_size=12
)


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_every_epoch_trains_on_every_row_once(rows, count, epochs, seed):
    count = min(count, rows)
    plan = minibatches(rows, count, epochs, seed, step=3)
    assert len(plan) == count * epochs
    for epoch in range(epochs):
        parts = plan[epoch * count : (epoch + 1) * count]
        assert sorted(row for part in parts for row in part) == list(range(rows))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert plan == minibatches(rows, count, epochs, seed, step=3)


def test_schedules_warm_up_and_end_at_zero():
    rates = [learning_rate(u, 10, 1.0, Optim(schedule=Schedule.linear, warmup_steps=2)) for u in range(11)]
    assert rates == pytest.approx([0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0])
    cosine = [learning_rate(u, 4, 2.0, Optim(schedule=Schedule.cosine)) for u in range(5)]
    assert cosine == pytest.approx([2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5), 0])
    assert {learning_rate(u, 4, 3.0, Optim()) for u in range(4)} == {3.0}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("budget", [1, 12, 30, 1000])
def test_micro_batches_hold_every_row_once_and_keep_the_budget(shared, budget):
    rollouts = example().rollouts
    rows = [row for row in range(len(rollouts)) if rollouts.completion_mask[row].any()]
    micros = list(pack(rollouts, rows, budget, shared))
    assert sorted(row for micro in micros for row in micro) == rows
    for micro in micros:
        prompts = {rollouts.prompt_ids[row] for row in micro}
        padded = max(map(len, prompts)) * (len(prompts) if shared else len(micro))
        padded += int(rollouts.lengths[micro].max()) * len(micro)
        assert padded <= budget or len(micro) == 1


@pytest.mark.parametrize("world", [1, 2, 3, 20])
def test_processes_share_the_rows_without_overlap(world):
    rollouts = example().rollouts
    parts = [share(rollouts, list(range(len(rollouts))), rank, world) for rank in range(world)]
    assert sorted(row for part in parts for row in part) == list(range(len(rollouts)))


@given(ROWS, st.integers(1, 4), st.sampled_from(ops.AGGREGATIONS))
@settings(max_examples=80, deadline=None)
def test_shares_of_any_split_add_up(rows, parts, how):
    """Peers A1, A4, A8, A10: one denominator; empty rows count as rows and never as tokens."""
    width = 7
    losses = torch.zeros(len(rows), width, dtype=torch.float64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (_, values) in enumerate(rows):
        losses[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
        mask[row, : len(values)] = True
    losses = losses.masked_fill(~mask, float("nan"))  # whatever stands in the padding
    denominator = ops.denominators(mask, const_len=10)[how]
    whole = ops.aggregate(losses, mask, how, denominator)
    split = sum(
        ops.aggregate(losses[part], mask[part], how, denominator) for part in torch.arange(len(rows)).chunk(parts)
    )
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-12)
    assert bool(whole.isfinite())


def test_aggregations_by_hand():
    """Two rows, 5 and 1 tokens (peers A5): row means 2 and 10; sums 10 and 10; C = 20."""
    losses = torch.tensor([[1.0, 2, 3, 2, 2], [10.0, 99, 99, 99, 99]])
    mask = torch.tensor([[True] * 5, [True] + [False] * 4])
    expected = {"seq_mean": 6.0, "token_mean": 20 / 6, "const_len": 20 / 40, "seq_sum": 10.0, "token_sum": 20.0}
    for how, value in expected.items():
        assert ops.aggregate(losses, mask, how, ops.denominators(mask, 20)[how]).item() == pytest.approx(value)


def test_a_fully_masked_row_adds_nothing_to_the_token_count():
    """Peers A10: four live tokens and an empty row give a gradient of 1/4 per token, not 1/5."""
    losses = torch.ones(2, 4, requires_grad=True)
    mask = torch.tensor([[True] * 4, [False] * 4])
    ops.aggregate(losses, mask, "token_mean", ops.denominators(mask, 9)["token_mean"]).backward()
    assert losses.grad.tolist() == [[0.25] * 4, [0.0] * 4]


def test_rows_without_advantage_are_left_out_and_the_weights_are_the_same(tmp_path, monkeypatch):
    watched = ["+plugins.answer.weight=1", "plugins.function.weight=0"]
    train(tmp_path / "skipped", "steps=3", "lr=1e-3", *watched)
    assert metrics(tmp_path / "skipped")[1]["update/skipped_rows"] == 1.0  # an untrained policy is always wrong
    train(tmp_path / "some", "steps=3", "lr=1e-3")
    everybody = lambda cycle, rows, all_rows: [row for row in rows if cycle.rollouts.completion_mask[row].any()]  # noqa: E731
    monkeypatch.setattr(grpozoo.update, "_live", everybody)
    train(tmp_path / "all", "steps=3", "lr=1e-3")
    assert difference(tmp_path / "some", tmp_path / "all") < 1e-7


def test_a_step_without_a_token_is_no_step(tmp_path, monkeypatch):
    """Peers A11: finite, nothing moves, and the metric says so."""
    from dataclasses import replace

    from grpozoo.run.passes import Passes

    real = Passes.measure

    def hide(self, rollouts):
        return real(self, replace(rollouts, completion_mask=torch.zeros_like(rollouts.completion_mask)))

    train(tmp_path / "still", "steps=1", "lr=0")
    monkeypatch.setattr(Passes, "measure", hide)
    train(tmp_path / "masked", "steps=2", "optim.weight_decay=0.1")
    assert difference(tmp_path / "masked", tmp_path / "still") == 0
    assert metrics(tmp_path / "masked")[1]["update/skipped_steps"] == 1.0
