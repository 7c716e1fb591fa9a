"""The reference follows the policy: when, how far, and over a resume."""

import io

import pytest
import torch
from grpozoo_plugins.reference import Reference

from grpozoo import UserError
from grpozoo.testing import check_plugin
from grpozoo.testing.context import Context
from grpozoo.testing.golden import compose


def started(*options):
    """The plugin and the run, its policy one unit away from the reference in every weight."""
    config, active = compose("algo=[kl,reference]", *(f"plugins.reference.{option}" for option in options))
    run = Context(config, active)
    run.hooks.setup(run=run)
    with torch.no_grad():
        for value in run.policy.model.parameters():
            value.add_(1.0)
    return active.plugins["reference"], run


def weights(policy):
    return {name: value.detach().clone() for name, value in policy.model.named_parameters()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def after(run, *steps):
    for step in steps:
        run.hooks.after_step(step=step, metrics={}, run=run)


def test_it_is_copied_after_every_so_many_steps():
    plugin, run = started("every=3")
    start = weights(run.reference)
    after(run, 1, 2)
    assert same(weights(run.reference), start)
    after(run, 3)
    assert same(weights(run.reference), weights(run.policy)) and not same(weights(run.reference), start)
    assert run.reference.model is not run.policy.model
    assert [value for _, value, _ in plugin.logged] == [0, 0, 1]


def test_a_share_below_one_is_a_moving_mean():
    """The policy is 1 above: after one refresh by .6 the reference is .6 above its start, after two .6 + .4 * .6 = .84."""
    _, run = started("every=1", "share=0.6")
    start = weights(run.reference)
    for step, moved in ((1, 0.6), (2, 0.84)):
        after(run, step)
        for name, value in weights(run.reference).items():
            torch.testing.assert_close(value, start[name] + moved, rtol=0, atol=1e-6)  # float32, weights of size 1


def test_the_policy_is_left_alone():
    _, run = started("every=1", "share=0.6")
    before = weights(run.policy)
    after(run, 1)
    assert same(weights(run.policy), before)


def test_a_refreshed_reference_survives_a_resume_bit_for_bit():
    plugin, run = started("every=2", "share=0.3")
    assert plugin.state_dict() == {}
    after(run, 1, 2)
    buffer = io.BytesIO()
    torch.save(plugin.state_dict(), buffer)
    saved = weights(run.reference)
    after(run, 4)  # what was saved does not move with the reference
    buffer.seek(0)
    resumed, other = started("every=2", "share=0.3")
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert same(resumed.state_dict(), saved)  # saved again before the next refresh
    assert same(weights(other.reference), saved) and not same(saved, weights(run.reference))
    after(other, 4)
    assert same(weights(other.reference), weights(run.reference))
    assert same(resumed.state_dict(), plugin.state_dict())


def test_the_state_is_a_copy():
    plugin, run = started("every=1", "share=0.5")
    after(run, 1)
    state = plugin.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    after(run, 2)
    assert same(state, kept)


def test_a_resume_from_a_run_without_it_keeps_the_reference_of_the_start():
    plugin, run = started()
    start = weights(run.reference)
    plugin.load_state_dict({})
    assert same(weights(run.reference), start) and plugin.state_dict() == {}


def test_a_run_that_compares_with_nothing_is_told_what_to_add():
    config, active = compose("algo=reference")
    with pytest.raises(UserError, match=r"nothing in this run compares(.|\n)*algo=\[kl,reference\]"):
        active.hooks.validate(config=config, active=active)
    for overrides in (["algo=[kl,reference]"], ["algo=reference", "plugins.grpo.kl_coef=0.04"]):
        config, active = compose(*overrides)
        assert not any(active.hooks.validate(config=config, active=active))


@pytest.mark.parametrize(
    "options, message",
    [({"every": 0}, "every is at least 1"), ({"share": 0.0}, "share lies in"), ({"share": 1.1}, "share lies in")],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Reference.Config(**options)


def test_conformance():
    check_plugin("reference", "algo=[kl,reference]", "plugins.reference.every=1", "plugins.reference.share=0.6")
