"""PPO's numbers (method sheet, sections 3.11 and 6.5, property 9 of section 7), and what its critic learns and keeps."""

import io
from dataclasses import replace

import processes
import pytest
import torch
from grpozoo_plugins.ppo import Ppo, gae, value_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runs import SMALL, difference, digest, metrics, one_thread, train  # noqa: F401

from grpozoo import group_mean
from grpozoo.testing import advantages, assemble, check_plugin, fixture, loss
from grpozoo.testing.context import Context
from grpozoo.testing.example import example, retotal, select, widen
from grpozoo.testing.golden import compose
from grpozoo.update import cut

PLAIN = ("plugins.ppo.lam=1", "plugins.ppo.whiten=false")
KINDS = ("model", "head")
NAN = float("nan")


def live(*overrides, values=None):
    """(plugin, run) as a run sets them up; values [R, T] instead of the critic's."""
    config, active = compose("algo=ppo", *overrides)
    run = Context(config, active)
    active.hooks.setup(run=run)
    plugin = active.plugins["ppo"]
    if values is not None:
        plugin.values = lambda rollouts, run: values
    return plugin, run


def answer(run, step):
    """Advantages [R, T] of a step, by the hook."""
    return run.hooks.advantage(rollouts=step.rollouts, rewards=step.rewards, run=run)


def begin(plugin, run, step):
    """What a run does before its updates: advantages and what the plugin logged."""
    A = answer(run, step)
    run.hooks.before_update(rollouts=step.rollouts, rewards=step.rewards, advantages=A.float(), run=run)
    logged = {name: [value for other, value, _ in plugin.logged if other == name] for name, _, _ in plugin.logged}
    plugin.logged.clear()
    return A, logged


def one_row(length, total, width=None):
    """A step of one completion."""
    zeros = torch.zeros(1, width or length, dtype=torch.float64)
    names = ("logprobs", "old_logprobs", "ref_logprobs", "entropy")
    return assemble([length], [0], [total], {name: zeros for name in names}, zeros)


def weights(plugin):
    return [tensor.detach().clone() for tensor in plugin.trained]


def saved(plugin):
    """The state as a checkpoint gives it back."""
    buffer = io.BytesIO()
    torch.save(plugin.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# --- numbers of the sheet


@pytest.mark.parametrize(
    "lam, A, R",
    [
        (1.0, [0.8, 0.6, 0.5, 0.3], [1, 1, 1, 1]),
        (0.95, [0.732712, 0.560750, 0.485, 0.3], [0.932712, 0.960750, 0.985, 1]),
    ],
)
def test_advantages_and_returns_of_the_worked_example(lam, A, R):
    """Rewards (0, 0, 0, 1), V = (.2, .4, .5, .7): delta = .2, .1, .2, .3."""
    V = torch.tensor([[0.2, 0.4, 0.5, 0.7]], dtype=torch.float64)
    plugin, run = live(f"plugins.ppo.lam={lam}", "plugins.ppo.whiten=false", values=V)
    assert answer(run, one_row(4, 1.0))[0].tolist() == pytest.approx(A, abs=1e-6)
    assert plugin.pending[2][0].tolist() == pytest.approx(R, abs=1e-6)


def test_whitened_advantages_of_the_worked_example_leave_the_returns_alone():
    """A = (.8, .6, .5, .3): mean .55, variance .13 / 3; padding takes no part."""
    V = torch.tensor([[0.2, 0.4, 0.5, 0.7, 9.0, 9.0]], dtype=torch.float64)
    plugin, run = live("plugins.ppo.lam=1", values=V)
    expected = [1.200961, 0.240192, -0.240192, -1.200961, 0, 0]
    assert answer(run, one_row(4, 1.0, width=6))[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert plugin.pending[2][0, :4].tolist() == pytest.approx([1, 1, 1, 1], abs=1e-12)


def test_value_loss_of_the_worked_example():
    """Clipped V = (.4, .3, .7, .6); larger squares .36, .49, .09, .16; half their mean .1375."""
    V, old = torch.tensor([0.5, 0.3, 0.9, 0.6]), torch.tensor([0.2, 0.4, 0.5, 0.7])
    losses = value_loss(V.requires_grad_(), old, torch.ones(4), 0.2)
    assert losses.mean().item() == pytest.approx(0.1375, abs=1e-6)
    losses.mean().backward()  # tokens 0 and 2 stand at the clip: no gradient; (V - 1) / 4 elsewhere
    assert V.grad.tolist() == pytest.approx([0, -0.175, 0, -0.1], abs=1e-6)


@pytest.mark.parametrize("options, expected", [([], -0.166787), (["plugins.grpo.clip_high=0.28"], -0.182516)])
def test_the_policy_loss_is_the_clip_surrogate_averaged_over_tokens(options, expected):
    """Rows clip .2/.2 and .2/.28, token_mean, of section 6.2 with GRPO's advantages."""
    value, gradient = loss("algo=ppo", *options, advantages=advantages())
    assert value == pytest.approx(expected, abs=1e-6)
    assert gradient[0, :3].tolist() == pytest.approx([-0.033714, 0, -0.029018], abs=1e-6)
    assert gradient[1].tolist() == pytest.approx([0, 0.035442, 0.042432, 0.030505, 0.039170], abs=1e-6)


# --- advantages


def test_with_the_group_mean_as_value_it_is_dr_grpo():
    """Property 9: gamma = lam = 1, no whitening; dr_grpo is GRPO without the std."""
    plugin, run = live(*PLAIN)
    centred = compose("plugins.grpo.std=none")[1].hooks

    @given(st.lists(st.floats(-5, 5), min_size=8, max_size=8))
    @settings(max_examples=40, deadline=None)
    def holds(rewards):
        step = retotal(fixture(), rewards)
        mean = group_mean(step.rewards.total, step.rollouts.group_id)[:, None].expand(step.batch.mask.shape)
        plugin.values = lambda rollouts, run: mean
        expected = centred.advantage(rollouts=step.rollouts, rewards=step.rewards, run=run)[:, None] * step.batch.mask
        torch.testing.assert_close(answer(run, step), expected, rtol=0, atol=1e-7)  # differences below 1e-8 count as 0

    holds()


def test_the_critics_own_constant_is_the_baseline():
    """The same through the model: u = 0, b = the mean of both groups."""
    step = retotal(fixture(), [1, 0, 0, 1, 0.5, 0.5, 1, 0])
    plugin, run = live(*PLAIN)
    with torch.no_grad():
        plugin.head[1].fill_(0.5)
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5, 0, 0, 0.5, -0.5], dtype=torch.float64)[:, None] * step.batch.mask
    torch.testing.assert_close(answer(run, step), expected, rtol=0, atol=1e-12)


def test_a_value_belongs_to_the_state_before_its_token():
    """Against one plain forward over prompt and completion of each row."""
    step = example()
    plugin, run = live()
    torch.manual_seed(0)
    with torch.no_grad():
        plugin.head[0].normal_()
        V = plugin.values(step.rollouts, run)
        for row, length in enumerate(step.rollouts.lengths.tolist()):
            prompt, completion = step.rollouts.prompt_ids[row], step.rollouts.completion_ids[row, :length].tolist()
            ids = torch.tensor([[*prompt, *completion]])
            states = run.policy.model.get_decoder()(input_ids=ids).last_hidden_state[0]
            expected = states[len(prompt) - 1 : len(prompt) - 1 + length] @ plugin.head[0]
            torch.testing.assert_close(V[row, :length], expected, rtol=0, atol=1e-5)
            assert not V[row, length:].any()


def test_masked_tokens_inside_a_row_are_passed_over():
    """A tool's two tokens between the second and third of four change nothing."""
    r, V = torch.tensor([[0, 0.1, 0, 1.0]]), torch.tensor([[0.2, 0.4, 0.5, 0.7]])
    mask = torch.tensor([[True, True, False, False, True, True]])
    wide_r, wide_V = torch.full(mask.shape, 5.0), torch.full(mask.shape, 7.0)
    wide_r[mask], wide_V[mask] = r[0], V[0]
    found = gae(wide_r, wide_V, mask, 0.9, 0.8)
    torch.testing.assert_close(found[mask], gae(r, V, torch.ones(1, 4, dtype=torch.bool), 0.9, 0.8)[0])
    assert not found[~mask].any()


def test_token_rewards_stand_at_their_tokens_and_the_rest_at_the_last():
    """Token rewards (-.1, -.2, 0), total .7 of which 1.0 is the completion's: returns to go .7, .8, 1 at V = 0."""
    step = one_row(3, 0.7, width=4)
    tokens = torch.tensor([[-0.1, -0.2, 0.0, 0.0]], dtype=torch.float64)
    step = step._replace(rewards=replace(step.rewards, tokens=tokens))
    assert answer(live(*PLAIN)[1], step)[0].tolist() == pytest.approx([0.7, 0.8, 1.0, 0], abs=1e-12)
    assert tokens[0].tolist() == [-0.1, -0.2, 0, 0]


def test_a_discount_counts_tokens():
    """gamma = .5, lam = 1, V = 0: the reward at the last of three tokens is worth .25, .5, 1."""
    _, run = live(*PLAIN, "plugins.ppo.gamma=0.5")
    assert answer(run, one_row(3, 1.0))[0].tolist() == pytest.approx([0.25, 0.5, 1], abs=1e-12)


def test_a_truncated_completion_ends_like_any_other():
    step = fixture()
    stopped = step._replace(rollouts=replace(step.rollouts, finish_reason=("stop",) * 8))
    cut_short = step._replace(rollouts=replace(step.rollouts, finish_reason=("length",) * 8))
    assert torch.equal(answer(live()[1], stopped), answer(live()[1], cut_short))


# --- the critic


@pytest.mark.parametrize("kind, left, explained", [("model", 0.25, 0.5), ("head", 0.4, 0.15)])
def test_the_critic_learns_and_the_policy_stays(kind, left, explained):
    """The best constant would leave 0.42 of the loss and explain nothing; given states tell rows apart less well."""
    step, random = fixture(), torch.random.get_rng_state()
    plugin, run = live(f"plugins.ppo.critic={kind}", "plugins.ppo.critic_lr=0.02", "plugins.ppo.critic_epochs=4")
    before = [parameter.detach().clone() for parameter in run.policy.model.parameters()]
    course = [begin(plugin, run, step)[1] for _ in range(8)]
    first, last = course[0], course[-1]
    assert first["ppo/value_mean"] == [0.0] and first["ppo/explained_variance"] == pytest.approx([0.0], abs=1e-9)
    assert last["ppo/value_loss"][-1] < left * first["ppo/value_loss"][0]
    assert last["ppo/explained_variance"][0] > explained
    assert torch.equal(random, torch.random.get_rng_state())
    for parameter, old in zip(run.policy.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old) and parameter.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_critics_memory_is_parameters_and_two_moments(kind):
    """Numbers of 4 bytes, three times: weights, mean, mean square; and a step count for each tensor."""
    plugin, run = live(f"plugins.ppo.critic={kind}")
    _, logged = begin(plugin, run, fixture())
    policy = sum(parameter.numel() for parameter in run.policy.model.parameters()) if kind == "model" else 0
    assert logged["ppo/critic_mb"] == pytest.approx([(3 * (policy + 16 + 1) + len(plugin.trained)) * 4 / 1e6])
    assert all(tensor.grad is None for tensor in plugin.trained)


def test_the_first_step_of_the_head_by_hand():
    """V = 0, R = r for lam 1: loss r^2 / 2 on every token; the gradient of b is -mean r, so Adam moves b up by lr."""
    step = fixture()
    plugin, run = live("plugins.ppo.lam=1", "plugins.ppo.critic_lr=0.01", "optim.max_grad_norm=0")
    _, logged = begin(plugin, run, step)
    counts, rewards = step.rollouts.lengths.double(), step.rewards.total
    assert logged["ppo/value_loss"] == pytest.approx([float((counts * rewards**2).sum() / counts.sum()) / 2], abs=1e-6)
    moments = plugin.optimizer.state[plugin.head[1]]
    assert moments["exp_avg"].item() == pytest.approx(-0.1 * float((counts * rewards).sum() / counts.sum()), abs=1e-6)
    assert plugin.head[1].item() == pytest.approx(0.01, abs=1e-6)


def test_the_critics_gradient_is_clipped_at_the_runs_norm():
    plugin, run = live("optim.max_grad_norm=1e-3", "optim.betas=[0.0,0.9]")
    begin(plugin, run, fixture())
    means = torch.cat([plugin.optimizer.state[tensor]["exp_avg"].flatten() for tensor in plugin.trained])
    assert means.norm().item() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize(
    "overrides, steps",
    [
        ([], 1),
        (["update.epochs=3", "update.mini_batches=2"], 6),
        (["update.epochs=3", "update.mini_batches=2", "plugins.ppo.critic_epochs=1"], 2),
        (["plugins.ppo.critic_minibatches=4"], 4),
    ],
)
def test_passes_and_steps_are_the_runs_unless_given(overrides, steps):
    plugin, run = live(*overrides)
    _, logged = begin(plugin, run, fixture())
    assert len(logged["ppo/value_loss"]) == steps
    assert plugin.optimizer.state[plugin.head[1]]["step"].item() == steps


@pytest.mark.parametrize("kind", KINDS)
def test_splitting_a_step_of_the_critic_changes_rounding_only(kind):
    """Rows one by one, longest first; what falls to three processes adds up by the same denominators."""
    step, options = example(), (f"plugins.ppo.critic={kind}", "update.mini_batches=2", "update.epochs=2")
    whole, run = live(*options)
    split, other = live(*options)

    def mine(rollouts, rows):
        for row in sorted(rows, key=lambda row: -int(rollouts.lengths[row])):
            if rollouts.completion_mask[row].any():
                yield [row], cut(rollouts.select([row]))

    other.mine = mine
    for _ in range(3):
        A, B = begin(whole, run, step)[0], begin(split, other, step)[0]
    torch.testing.assert_close(A, B, rtol=0, atol=1e-4)
    for one, two in zip(weights(whole), weights(split), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)  # lr 1e-4; Adam magnifies rounding of tiny gradients


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_reward_count_nowhere(kind):
    """Advantage 0; whitening, the critic's update and metrics as if they were not there.

    Adam makes 1e-5 of rounding in nine steps; a critic that learnt from them would be off by 1e-3 and more.
    """
    options = (f"plugins.ppo.critic={kind}", "plugins.ppo.critic_lr=0.01", "plugins.ppo.critic_epochs=3")
    step = retotal(fixture(), [1, 0, NAN, 1, NAN, 0.5, 1, 0])
    rows = [0, 1, 3, 5, 6, 7]
    (some, run), (alone, other) = live(*options), live(*options)
    for _ in range(3):
        A, logged = begin(some, run, step)
        B, expected = begin(alone, other, select(step, rows))
    assert not A[[2, 4]].any() and A.isfinite().all()
    torch.testing.assert_close(A[rows], B, rtol=0, atol=1e-4)
    for name, values in expected.items():
        assert logged[name] == pytest.approx(values, abs=1e-4)
    for one, two in zip(weights(some), weights(alone), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_a_token_or_a_reward_teaches_nothing(kind, recwarn):
    plugin, run = live(f"plugins.ppo.critic={kind}")
    before, step = weights(plugin), fixture()
    empty = replace(step.rollouts, completion_mask=torch.zeros_like(step.batch.mask))
    for nothing in (step._replace(rollouts=empty), retotal(step, [NAN] * 8)):
        A, logged = begin(plugin, run, nothing)
        assert not A.any() and not logged
    assert all(torch.equal(one, two) for one, two in zip(before, weights(plugin), strict=True))
    assert not recwarn.list


def test_an_empty_completion_changes_no_other_row():
    """Its reward has no token to stand at."""
    step = example()
    rows = [row for row, length in enumerate(step.rollouts.lengths.tolist()) if length]
    A, B = answer(live()[1], step), answer(live()[1], select(step, rows))
    assert len(rows) == len(A) - 1
    torch.testing.assert_close(A[rows], B, rtol=0, atol=1e-12)


def test_padding_changes_nothing_after_the_critic_has_learnt():
    (plain, run), (wide, other) = live("plugins.ppo.critic_lr=0.01"), live("plugins.ppo.critic_lr=0.01")
    for _ in range(3):
        A, B = begin(plain, run, example())[0], begin(wide, other, widen(example(), 3))[0]
    torch.testing.assert_close(B[:, :6], A, rtol=0, atol=1e-5)
    assert not B[:, 6:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_critic_goes_on_bit_for_bit(kind):
    options = (f"plugins.ppo.critic={kind}", "plugins.ppo.critic_lr=0.01", "update.mini_batches=2")
    plugin, run = live(*options)
    for _ in range(2):
        begin(plugin, run, example())
    fresh, other = live(*options)
    fresh.load_state_dict(saved(plugin))
    for one, two in zip(begin(plugin, run, example()), begin(fresh, other, example()), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert all(torch.equal(one, two) for one, two in zip(weights(plugin), weights(fresh), strict=True))
    fresh.load_state_dict({})  # a checkpoint from before the plugin was there
    assert all(torch.equal(one, two) for one, two in zip(weights(plugin), weights(fresh), strict=True))


def test_a_critic_that_is_not_finite_stops_the_run():
    from grpozoo import UserError

    plugin, run = live()
    with torch.no_grad():
        plugin.head[1].fill_(torch.inf)
    with pytest.raises(UserError, match="critic's values are not finite: .*critic_lr"):
        begin(plugin, run, fixture())


# --- as a plugin


def test_conformance():
    """The baseline is V, not the group: an untrained critic gives equal rewards and single rows an advantage."""
    check_plugin("ppo", "algo=ppo", skip=["equal rewards", "singleton"])
    check_plugin("ppo", "algo=ppo", "plugins.ppo.critic=head", skip=["equal rewards", "singleton"])


@pytest.mark.parametrize(
    "options",
    [
        {"gamma": 0.0}, {"gamma": 1.1}, {"lam": -0.1}, {"lam": 1.5}, 
        {"clip_value": 0.0}, {"critic_lr": -1.0}, {"critic_epochs": 0}, {"critic_minibatches": 0},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Ppo.Config(**options)


# --- whole runs


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, kind):
    overrides = ["algo=ppo", f"plugins.ppo.critic={kind}", "update.mini_batches=2", "group_size=2"]
    train(tmp_path / "straight", *overrides, "steps=4")
    train(tmp_path / "stopped", *overrides, "steps=2")
    train(tmp_path / "stopped", *overrides, "steps=4", f"resume={tmp_path / 'stopped'}")
    assert digest(tmp_path / "stopped") == digest(tmp_path / "straight")
    straight, stopped = (
        [
            {key: value for key, value in line.items() if not key.startswith("heldout/")}
            for line in metrics(tmp_path / name)
        ]
        for name in ("straight", "stopped")  # the stopped run was evaluated at its end, too
    )
    assert stopped == straight and len(straight) == 5
    assert {name for name in straight[1] if name.startswith("ppo/")} == {f"ppo/{name}" for name in Ppo.metrics}
    assert straight[1]["ppo/value_mean"] == 0 != straight[4]["ppo/value_mean"]


@pytest.mark.slow
def test_two_processes_make_the_update_of_one(tmp_path):
    """Three prompts on two processes: the same critic, the same values, the same policy."""
    overrides = [
        "algo=ppo",
        "steps=2",
        "prompts_per_step=3",
        "update.mini_batches=2",
        "lr=1e-3",
    ]
    train(tmp_path / "one", *overrides)
    processes.two([*SMALL, f"run_dir={tmp_path / 'two'}", *overrides], tmp_path)
    assert difference(tmp_path / "one", tmp_path / "two") < 1e-5
    states = []
    for name in ("one", "two"):
        (folder,) = (tmp_path / name / "checkpoints").glob("step-00000002")
        states.append(torch.load(folder / "trainer.pt", weights_only=True)["plugins"]["ppo"]["trained"])
    assert max(float((a - b).abs().max()) for a, b in zip(*states, strict=True)) < 1e-5
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert a == pytest.approx(b, abs=1e-4, nan_ok=True)
