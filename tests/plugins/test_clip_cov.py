"""algo=clip_cov: the worked batch, which tokens may be dropped, and a draw that knows tokens by what they are."""

from copy import copy
from dataclasses import replace

import pytest
import torch
from grpozoo_plugins.clip_cov import ClipCov
from hypothesis import given, settings
from hypothesis import strategies as st
from two_groups import GRPO, TOKENS, places, two_groups

from grpozoo.testing import Context, check_plugin, compose, loss
from grpozoo.testing.example import regroup, relabel, select, widen

ELIGIBLE = {(1, 3), (7, 2)}  # covariances 1.506084 and 1.931426; all others are below 1
WIDE = {"lower": 0.05, "share": 0.1}  # 21 tokens to draw three from
RUN = Context(*compose("algo=clip_cov"))


class Draw:
    """The plugin at one step of a run."""

    def __init__(self, step=1, **options):
        self.plugin = ClipCov(ClipCov.Config(**options))
        self.plugin.name = "clip_cov"
        self.run = copy(RUN)
        self.run.step = step

    def __call__(self, step=None, lift=0.0):
        """What one optimizer step drops; `lift` is added to new and old log-probabilities."""
        step = step or two_groups()
        batch = replace(step.batch, old_logprobs=step.batch.old_logprobs + lift)
        out = replace(step.out, logprobs=step.out.logprobs.detach() + lift)
        return places(self.plugin.minibatch(batch=batch, out=out, run=self.run)["clip_cov/dropped"])


@pytest.mark.parametrize("options", [{}, WIDE])
def test_conformance(options):
    check_plugin("clip_cov", "algo=clip_cov", *(f"plugins.clip_cov.{name}={value}" for name, value in options.items()))


def test_loss_of_the_worked_batch():
    """One of two tokens is dropped, which one depends on the seed; with none eligible it is the clip of [0, 2]."""
    expected = {frozenset({(1, 3)}): -0.076132, frozenset({(7, 2)}): -0.121664}
    none, plain = loss("algo=clip_cov", "plugins.clip_cov.lower=4", *GRPO, step=two_groups())
    assert none == pytest.approx(-0.059058, abs=1e-6)
    seen = set()
    for seed in range(8):
        found, gradient = loss("algo=clip_cov", f"seed={seed}", *GRPO, step=two_groups())
        dropped = frozenset(places((gradient == 0) & two_groups().batch.mask))
        assert found == pytest.approx(expected[dropped], abs=1e-6)
        kept = gradient != 0
        assert torch.equal(gradient[kept], plain[kept])
        seen.add(dropped)
    assert len(seen) == 2


def test_eligible_tokens_of_the_worked_batch():
    draw = Draw(share=1.0)
    assert draw() == ELIGIBLE
    assert draw.plugin.logged[0] == ("clip_cov/eligible", 2 / TOKENS, TOKENS)
    assert Draw(share=1.0, upper=1.7)() == {(1, 3)}
    assert Draw(share=1.0, lower=1.7)() == {(7, 2)}
    assert Draw(share=1.0, lower=2.0)() == set()


def test_what_the_clip_holds_is_not_eligible():
    """(1, 3): A < 0 and w = exp(-0.4) = 0.67 < 0.8 is clipped; (7, 2): A < 0 and w = 1.42 is not."""
    assert Draw(share=1.0, clip=0.2)() == {(7, 2)}
    assert Draw(share=1.0, clip_high=0.2)() == ELIGIBLE


@pytest.mark.parametrize("share, dropped", [(0.0, 1), (0.02, 1), (0.06, 2), (0.1, 3), (0.9, 21)])
def test_number_of_dropped_tokens(share, dropped):
    """max(floor(r 34), 1), and never more than are eligible: 21 tokens have a covariance above 0.05."""
    assert len(Draw(lower=0.05, share=share)()) == dropped


def test_every_eligible_token_is_dropped_as_often():
    """Over 400 steps either of two is dropped 200 times; 3.5 standard deviations are 35."""
    draw, count = Draw(), 0
    for step in range(400):
        draw.run.step = step
        draw.plugin.before_update()
        count += draw() == {(1, 3)}
    assert abs(count - 200) <= 35


@given(st.permutations(range(8)), st.integers(0, 3), st.booleans(), st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_the_draw_goes_by_identity(order, columns, renamed, step):
    """Row order, padding and the names of groups do not change which tokens are dropped."""
    other = widen(select(two_groups(), order), columns)
    found = Draw(step, **WIDE)(relabel(other) if renamed else other)
    assert {(order[row], token) for row, token in found} == Draw(step, **WIDE)()


def test_two_groups_of_one_prompt_draw_apart():
    """The same four rows asked for twice: twins are told apart by their group, whatever the row order."""
    twins = regroup(two_groups(), [4, 5, 6, 7] * 2, [0] * 4 + [1] * 4)
    prompts = twins.rollouts.prompts[:1] * 8
    twins = twins._replace(batch=replace(twins.batch, rollouts=replace(twins.rollouts, prompts=prompts)))
    assert len({prompt.id for prompt in prompts}) == 1
    drawn = [Draw(step)(twins) for step in range(12)]
    assert {frozenset(found) for found in drawn} == {frozenset({(3, 2)}), frozenset({(7, 2)})}
    turned = [{(7 - row, token) for row, token in Draw(step)(select(twins, range(7, -1, -1)))} for step in range(12)]
    assert turned == drawn


@given(st.floats(-3, 3))
@settings(max_examples=40, deadline=None)
def test_a_constant_added_to_all_logprobs_changes_no_draw(lift):
    assert Draw(**WIDE)(lift=lift) == Draw(**WIDE)()


def test_updates_of_one_step_draw_their_own_numbers():
    draw = Draw(**WIDE)
    drawn = {frozenset(draw()) for _ in range(6)}
    assert len(drawn) > 3
    draw.plugin.before_update()
    assert frozenset(draw()) in drawn  # the next step begins anew, its own number keys the stream


def test_a_stop_between_updates_changes_nothing():
    draw, resumed = Draw(**WIDE), Draw(**WIDE)
    first = draw()
    resumed.plugin.load_state_dict(draw.plugin.state_dict())
    assert resumed() == draw() != first
    fresh = Draw(**WIDE)
    fresh.plugin.load_state_dict({})
    assert fresh() == first


@pytest.mark.parametrize(
    "options", [{"share": -0.1}, {"share": 1.1}, {"lower": 5.0}, {"clip": -0.1}, {"clip_high": -0.1}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ClipCov.Config(**options)
