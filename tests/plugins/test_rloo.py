"""RLOO's numbers on the worked example, its relation to centring, and the samplers it refuses."""

import pytest
import torch
from group_steps import advantage_of
from grpozoo_plugins.rloo import Rloo
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo import Plugin, UserError, hookimpl
from grpozoo.compose.plugins import register
from grpozoo.sampling import TokenSampler
from grpozoo.testing import Context, advantages, check_plugin, compose

GROUPS = st.lists(st.tuples(st.integers(0, 3), st.one_of(st.none(), st.floats(-5, 5))), min_size=1, max_size=20)


@pytest.mark.parametrize("options", [[], ["plugins.rloo.batch_norm=true"]])
def test_conformance(options):
    check_plugin("rloo", "algo=rloo", *options)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ([], [0.666667, -0.666667, -0.666667, 0.666667, -0.5, 0.166667, 0.833333, -0.5]),
        (["batch_norm=true"], [1.018195, -1.018195, -1.018195, 1.018195, -0.763646, 0.254549, 1.272743, -0.763646]),
        (["batch_norm=true", "eps=0"], [1.018350, -1.018350, -1.018350, 1.018350, -0.763763, 0.254588, 1.272938, -0.763763]),
    ],
)  # fmt: skip
def test_advantages_of_the_worked_example(overrides, expected):
    """The squares add up to 3.0, so the std is sqrt(3 / 7) = 0.654654."""
    found = advantages("algo=rloo", *(f"plugins.rloo.{override}" for override in overrides))
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


@given(GROUPS)
@settings(max_examples=60, deadline=None)
def test_it_is_the_mean_of_the_others_for_groups_of_any_size(rows):
    groups, rewards = [group for group, _ in rows], [reward for _, reward in rows]
    found = advantage_of("algo=rloo", rewards=rewards, groups=groups).tolist()
    for i, (group, reward) in enumerate(rows):
        others = [r for j, (g, r) in enumerate(rows) if g == group and r is not None and j != i]
        expected = 0.0 if reward is None or not others else reward - sum(others) / len(others)
        assert found[i] == pytest.approx(expected, abs=1e-7)  # spreads below 1e-8 count as none


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9))
@settings(max_examples=60, deadline=None)
def test_it_is_centring_times_n_over_n_minus_1(rewards):
    n = len(rewards)
    found = advantage_of("algo=rloo", rewards=rewards)
    torch.testing.assert_close(found, advantage_of("algo=dr_grpo", rewards=rewards) * n / (n - 1), rtol=0, atol=1e-12)
    assert float(found.sum()) == pytest.approx(0, abs=1e-12)


@given(GROUPS)
@settings(max_examples=60, deadline=None)
def test_batch_norm_gives_mean_0_and_std_1_over_rows_with_a_reward(rows):
    groups, rewards = [group for group, _ in rows], [reward for _, reward in rows]
    options = ("algo=rloo", "plugins.rloo.batch_norm=true", "plugins.rloo.eps=0")
    found = advantage_of(*options, rewards=rewards, groups=groups)
    kept = found[[reward is not None for reward in rewards]]
    assert bool(found.isfinite().all())
    assert float(kept.sum()) == pytest.approx(0, abs=1e-6)  # spreads of 1e-8 in rewards of 5 round at 1e-8
    if bool(found.any()):
        assert float(kept.std()) == pytest.approx(1, abs=1e-9)


def test_a_row_without_a_reward_leaves_group_and_batch():
    options = ("algo=rloo", "plugins.rloo.batch_norm=true")
    alone = advantage_of(*options, rewards=[1, 0, 0.5])
    assert advantage_of(*options, rewards=[1, None, 0, 0.5])[[0, 2, 3]].tolist() == alone.tolist()


class Coupled(Plugin):
    """A sampler that couples siblings, built in setup."""

    @hookimpl
    def setup(self, run):
        self.sampler = TokenSampler()
        self.sampler.independent = False

    @hookimpl
    def token_sampler(self):
        return self.sampler


@pytest.mark.parametrize("name, hint", [("rloo", "dr_grpo"), ("passk", "iid")])
@pytest.mark.parametrize("first", [True, False])
def test_a_sampler_that_couples_siblings_is_refused(name, hint, first):
    """Whichever of the two is set up first."""
    config, active = compose(f"algo={name}")
    rest = {key: plugin for key, plugin in active.plugins.items() if key != "iid"}
    coupled = {"coupled": Coupled(Coupled.Config())}
    run = Context(config, register(coupled | rest if first else rest | coupled))
    with pytest.raises(UserError, match=f"{name}.*couples(.|\n)*{hint}"):
        run.hooks.setup(run=run)


def test_an_epsilon_below_zero_is_refused():
    with pytest.raises(ValueError, match="eps"):
        Rloo.Config(eps=-1e-3)
