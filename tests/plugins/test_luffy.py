"""LUFFY: losses and gradients by hand, the traces that join a group, and what is refused."""

import json
from dataclasses import replace
from functools import cache
from math import exp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runs import SMALL, digest, metrics, train

from grpozoo import Prompt, Request, UserError
from grpozoo.testing import Context, advantages, assemble, check_plugin, compose, example, fixture, loss
from grpozoo.testing.example import whole_batch

ALONE = ("algo=luffy", "~plugins.entropy_bonus")


def with_traces(step, rows):
    """The same step, the given rows being traces."""
    policy = tuple("trace" if row in rows else "policy" for row in range(len(step.rollouts)))
    rollouts = replace(step.rollouts, policy=policy)
    return step._replace(rollouts=rollouts, batch=whole_batch(rollouts, step.rewards, step.batch.advantages))


def test_conformance():
    assert "resample" in check_plugin("luffy", "algo=luffy")
    check_plugin("luffy", *ALONE, "plugins.luffy.aggregation=token_mean", step=with_traces(example(), {1, 4, 8}))


def small():
    """One group: two own completions and a trace of two tokens; rewards 1 0 1, so A = 1/3, -2/3, 1/3."""
    old = torch.full((3, 2), -1.0, dtype=torch.float64)
    ratio = torch.tensor([[1.1, 1.3], [0.7, 1.5], [1, 1]], dtype=torch.float64)
    current = old + ratio.log()
    current[2] = torch.tensor([0.5, 0.1]).log()
    tables = {"logprobs": old, "old_logprobs": old, "ref_logprobs": old, "entropy": -old}
    return with_traces(assemble([2, 1, 2], [3, 3, 3], [1.0, 0.0, 1.0], tables, current), {2})


def test_loss_and_gradient_by_hand():
    """f(.5) = .5/.6, f(.1) = .1/.2; f'(p) p = .1 * .5/.36 and .1 * .1/.04; 1.3 is clipped at 1.2, .7 at .8; C = 5."""
    assert advantages(*ALONE, step=small()).tolist() == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    value, gradient = loss(*ALONE, step=small())
    own, trace = (1.1 + 1.2) / 3 - 0.8 * 2 / 3, (0.5 / 0.6 + 0.1 / 0.2) / 3
    assert value == pytest.approx(-(own + trace) / (3 * 5), abs=1e-7)
    assert value == pytest.approx(-0.045185, abs=1e-6)
    per_row = [[-1.1 / 3, 0], [0, 0], [-0.1 * 0.5 / 0.36 / 3, -0.1 * 0.1 / 0.04 / 3]]
    torch.testing.assert_close(gradient, torch.tensor(per_row, dtype=torch.float64) / 15, atol=1e-7, rtol=0)
    tokens, _ = loss(*ALONE, "plugins.luffy.aggregation=token_mean", step=small())
    assert tokens == pytest.approx(value * 15 / 5, abs=1e-7)  # 5 tokens


def test_fixture_f1_with_two_traces():
    """Rows 3 and 6 as traces, A = r - mean; every token by the equations."""
    step = with_traces(fixture(), {3, 6})
    A, C = [0.5, -0.5, -0.5, 0.5, -0.375, 0.125, 0.625, -0.375], 5
    assert advantages(*ALONE, step=step).tolist() == A
    expected, slope = 0.0, torch.zeros(8, 5, dtype=torch.float64)
    for i, t in step.batch.mask.nonzero().tolist():
        new, old = step.out.logprobs[i, t].item(), step.rollouts.old_logprobs[i, t].item()
        if i in (3, 6):
            expected -= exp(new) / (exp(new) + 0.1) * A[i]
            slope[i, t] = -0.1 * exp(new) / (exp(new) + 0.1) ** 2 * A[i]
        else:
            w = exp(new - old)
            expected -= min(w * A[i], min(max(w, 0.8), 1.2) * A[i])
            slope[i, t] = -w * A[i] if w * A[i] <= min(max(w, 0.8), 1.2) * A[i] else 0.0
    value, gradient = loss(*ALONE, step=step)
    assert value == pytest.approx(expected / (8 * C), abs=1e-6)
    torch.testing.assert_close(gradient, slope / (8 * C), atol=1e-7, rtol=0)


def test_without_a_trace_it_is_dr_grpo_and_the_upper_end_is_an_option():
    options = ("plugins.grpo.std=none", "plugins.grpo.aggregation=const_len")
    assert loss(*ALONE)[0] == pytest.approx(loss(*options)[0], abs=1e-9)
    higher = loss(*ALONE, "plugins.luffy.clip=0.1", "plugins.luffy.clip_high=0.28")[0]
    assert higher == pytest.approx(loss(*options, "plugins.grpo.clip=0.1", "plugins.grpo.clip_high=0.28")[0], abs=1e-9)


@given(st.floats(1e-4, 1.0), st.floats(0.01, 1.0), st.floats(-2, 2))
@settings(max_examples=25, deadline=None)
def test_the_gradient_of_a_trace_is_largest_where_p_is_gamma(p, gamma, A):
    """-f'(p) p A = -gamma p / (p + gamma)^2 A, and nothing of it depends on the old policy."""
    plugin = composed()[1].plugins["luffy"]
    plugin.config.gamma = gamma
    step = small()
    lp = torch.tensor([[p, gamma]], dtype=torch.float64).log().requires_grad_()
    batch = replace(
        whole_batch(step.rollouts.select([2]), step.rewards.select([2]), torch.tensor([A], dtype=torch.float64)),
        old_logprobs=torch.full((1, 2), -9.0, dtype=torch.float64),
    )
    (slope,) = torch.autograd.grad(plugin.policy_loss(batch=batch, out=replace(step.out, logprobs=lp)).sum(), lp)
    assert slope[0].tolist() == pytest.approx([-gamma * p / (p + gamma) ** 2 * A, -A / 4], abs=1e-9)
    assert abs(slope[0, 0]) <= abs(slope[0, 1]) + 1e-9


# The traces


@cache
def composed():
    return compose("algo=luffy", "plugins.luffy.column=traces")


def resampled(prompts, *overrides, groups=None):
    """(own rollouts, what resample makes of them and their rewards, the plugin)."""
    config, active = compose(*ALONE, *overrides)
    run = Context(config, active)
    groups = groups or list(range(len(prompts)))
    own = run.generate([Request(p, group, (4, 2, 7)) for p, group in zip(prompts, groups, strict=True)])
    return own, *active.hooks.resample(rollouts=own, rewards=run.score(own), run=run), active.plugins["luffy"]


def prompts_of(*extras):
    return [Prompt(f"q{i}", text=f"say {i}", answer=str(i), extra=extra) for i, extra in enumerate(extras)]


def test_every_group_gets_the_worked_solution_of_its_prompt():
    own, rollouts, rewards, plugin = resampled(prompts_of({}, {}), groups=[30, -4])
    assert len(rollouts) == len(rewards.total) == 8
    assert rollouts.policy == ("policy",) * 6 + ("trace",) * 2
    assert rollouts.group_id.tolist() == [30] * 3 + [-4] * 3 + [30, -4]
    assert rollouts.sample_id.tolist()[6:] == [8, 8]  # after 4, 2, 7
    assert rollouts.text[6:] == ("0", "1") and rewards.total.tolist()[6:] == [1.0, 1.0]
    assert rollouts.text[:6] == own.text and torch.equal(rollouts.completion_ids[:6], own.completion_ids)
    logged = {name: (value, weight) for name, value, weight in plugin.logged}
    assert logged == {"luffy/traces": (1.0, 1.0), "luffy/trace_reward": (1.0, 2.0)}


def test_an_all_wrong_group_learns_from_its_trace():
    """Rewards 0 0 0 1: mean 1/4."""
    step = with_traces(assemble([1] * 4, [0] * 4, [0.0, 0.0, 0.0, 1.0], TABLES, torch.zeros(4, 1)), {3})
    assert advantages(*ALONE, step=step).tolist() == [-0.25, -0.25, -0.25, 0.75]


TABLES = dict.fromkeys(("logprobs", "old_logprobs", "ref_logprobs", "entropy"), torch.zeros(4, 1))


def test_texts_of_a_column_one_or_several_and_groups_without():
    prompts = prompts_of({"traces": "0"}, {"other": 1}, {"traces": ["no", "2", "3"]}, {"traces": []}, {"traces": None})
    options = ("plugins.luffy.column=traces", "plugins.luffy.traces=2")
    _, rollouts, rewards, plugin = resampled(prompts, *options)
    assert rollouts.text[15:] == ("0", "no", "2") and rollouts.group_id.tolist()[15:] == [0, 2, 2]
    assert rollouts.sample_id.tolist()[15:] == [8, 8, 9]
    assert rewards.total.tolist()[15:] == [1.0, 0.0, 1.0]  # a trace is verified like any completion
    assert plugin.logged[0] == ("luffy/traces", 2 / 5, 1.0)
    assert len(resampled(prompts, "plugins.luffy.column=traces")[1]) == 15 + 2


def test_a_step_without_any_trace_is_an_error_that_says_what_to_do(monkeypatch):
    with pytest.raises(UserError, match=r"(?s)luffy.column=traces: no prompt of step 2 .*name a key"):
        resampled(prompts_of({}, {"other": "1"}), "plugins.luffy.column=traces")
    monkeypatch.setattr("grpozoo.testing.context.Copy.solution", lambda task, prompt: None)
    with pytest.raises(UserError, match=r"(?s)no worked solution for any prompt .*set plugins.luffy.column"):
        resampled(prompts_of({}))


def test_refusals():
    for option, message in [
        ("traces=0", "traces is at least 1"),
        ("gamma=0", "gamma is above 0"),
        ("clip=-1", "clip is"),
    ]:
        with pytest.raises(UserError, match=message):
            compose("algo=luffy", f"plugins.luffy.{option}")
    config, active = compose("algo=luffy", "plugins.luffy.traces=2")
    with pytest.raises(UserError, match="set plugins.luffy.column"):
        active.hooks.validate(config=config, active=active)
    with pytest.raises(UserError, match="dr_grpo and luffy both replace advantage"):
        compose("algo=[dr_grpo,luffy]")


def test_it_applies_after_dynamic_sampling():
    _, active = compose("algo=[luffy,dynamic_sampling]")
    assert active.answering()["resample"] == ["dynamic_sampling", "luffy"]


def test_the_preset_brings_the_entropy_bonus():
    config, active = compose("algo=luffy")
    assert config.plugins["entropy_bonus"] == {"coef": 0.01} and "entropy" in active.needs
    spread = loss("algo=luffy")[0] - loss(*ALONE)[0]
    H = fixture().rollouts.entropy[fixture().batch.mask]
    assert spread == pytest.approx(-0.01 * H.mean().item(), abs=1e-9)


def test_a_run_trains_on_traces_and_resumes_bit_for_bit(tmp_path):
    """Random weights, several updates: the policy comes to like the worked solutions, which it never sampled."""
    overrides = [
        "algo=luffy",
        "reward=answer",
        "max_completion_length=16",
        "update.mini_batches=2",
        "logger.completions=-1",
    ]
    small = SMALL[:-2]  # without the reward that is a function
    train(tmp_path / "run", *overrides, "steps=3", small=small)
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 4 * (4 + 1)
    train(tmp_path / "parts", *overrides, "steps=1", small=small)
    train(tmp_path / "parts", *overrides, "steps=3", f"resume={tmp_path / 'parts'}", small=small)
    assert digest(tmp_path / "run") == digest(tmp_path / "parts")
    liked = [line["luffy/trace_probability"] for line in metrics(tmp_path / "run") if "luffy/traces" in line]
    assert len(liked) == 3 and liked[2] > liked[0] > 0
