"""STARE: the numbers of its sheet (sections 6.1 to 6.4), the properties of section 7.1, and its options."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from grpozoo_plugins.stare import TABLE, Gate, Scope, Source, Stare, Variant
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpozoo import Output, UserError
from grpozoo.compose.plugins import activate
from grpozoo.compose.registry import installed
from grpozoo.ops import denominators
from grpozoo.testing import Context, assemble, check_plugin, compose, fixture, loss
from grpozoo.testing.example import garble, leaf, select, whole_batch, widen, with_tables
from grpozoo.update import Cycle, batch_of, objective

GRPO = [
    "plugins.grpo.eps=1e-6", "plugins.grpo.aggregation=token_mean", "plugins.grpo.clip=0.2", "plugins.grpo.clip_high=0.28",
]  # fmt: skip
ON = ["algo=stare", *GRPO, "plugins.stare.target_entropy=0.6"]  # H = 0.558824 is below
DUAL = ["plugins.dual_clip.clip_high=0.28", "plugins.grpo.clip_high=null"]  # the surrogate is dual_clip's then
RARE = [(0, 2), (3, 0), (5, 1)]  # L+ of the worked step
RARE_NEGATIVE = [(1, 3), (7, 2)]  # L-


def table(rows, width=5):
    """Ragged rows -> [R, width] float64, padded with 0."""
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)


def worked(on_policy=False):
    """Section 6.3: two groups of four, 34 tokens; six of them at ratios away from 1."""
    lengths = [5, 4, 5, 3, 5, 4, 5, 3]
    current = table([
        [-0.10, -0.02, -1.50, -0.30, -0.05], [-0.70, -0.01, -0.20, -2.20], [-0.05, -0.90, -0.03, -0.40, -0.60], [-2.50, -0.15, -0.08],
        [-0.20, -0.35, -0.04, -0.01, -0.12], [-0.60, -3.00, -0.25, -0.02], [-0.03, -0.07, -0.45, -1.10, -0.09], [-0.80, -0.06, -1.80],
    ])  # fmt: skip
    entropy = table([
        [0.40, 0.10, 1.20, 0.60, 0.20], [0.90, 0.05, 0.50, 1.40], [0.20, 0.80, 0.10, 0.70, 0.75], [1.30, 0.35, 0.25],
        [0.45, 0.55, 0.15, 0.05, 0.30], [0.85, 1.60, 0.50, 0.10], [0.10, 0.20, 0.65, 1.00, 0.30], [0.95, 0.20, 1.25],
    ])  # fmt: skip
    old = current.clone()
    moved = {(0, 2): 0.40, (1, 3): -0.40, (3, 0): 0.10, (5, 1): -0.05, (7, 2): 0.35, (2, 1): -0.30}
    for place, difference in {} if on_policy else moved.items():
        old[place] -= difference
    tables = {"logprobs": old, "old_logprobs": old, "ref_logprobs": old, "entropy": entropy}
    return assemble(lengths, [0] * 4 + [1] * 4, [1.0, 0, 0, 1, 1, 1, 1, 0], tables, current)


def begun(*overrides, step, advantages=None):
    """The plugin in its composition, and the step with its tables after before_update."""
    config, active = compose(*overrides)
    run = Context(config, active)
    if advantages is None:
        advantages = active.hooks.advantage(rollouts=step.rollouts, rewards=step.rewards, run=run)
    batch = whole_batch(step.rollouts, step.rewards, torch.as_tensor(advantages, dtype=torch.float64))
    active.hooks.before_update(rollouts=step.rollouts, rewards=step.rewards, advantages=batch.advantages, run=run)
    return active, step._replace(batch=with_tables(active.hooks, batch, step.out, run))


def weights(*overrides, step, advantages=None):
    """omega [R, T] of a step."""
    active, step = begun(*overrides, step=step, advantages=advantages)
    (answer,) = active.hooks.token_weights(batch=step.batch, out=step.out)
    return answer


def places(mask):
    return [tuple(place) for place in mask.nonzero().tolist()]


def logged(plugin):
    return {name.partition("/")[2]: value for name, value, _ in plugin.logged}


def stare(**options):
    plugin = Stare(Stare.Config(**options))
    plugin.name = "stare"
    return plugin


# --- the worked step (6.3) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, off_policy, on_policy, mean",
    [
        (["target_entropy=0.3"], -0.048852, -0.048058, 1.0),  # H = 19 / 34 is above: GRPO
        (["target_entropy=0.6"], -0.056326, -0.054623, 1.008824),  # 1 + 0.1 * 3 / 34
        (["target_entropy=0.6", "variant=C2"], -0.064624, -0.061582, 1.002941),  # 1 + (0.3 - 0.2) / 34
    ],
)
def test_loss_of_the_worked_step(options, off_policy, on_policy, mean):
    options = ["algo=stare", *GRPO, *(f"plugins.stare.{option}" for option in options)]
    assert loss(*options, step=worked())[0] == pytest.approx(off_policy, abs=1e-6)
    assert loss(*options, step=worked(on_policy=True))[0] == pytest.approx(on_policy, abs=1e-6)
    active, step = begun(*options, step=worked())
    assert float(step.batch.tables["stare/omega"][step.batch.mask].mean()) == pytest.approx(mean, abs=1e-6)
    assert logged(active.plugins["stare"])["weight"] == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("dual", [False, True])
def test_losses_of_single_tokens_of_the_worked_step(dual):
    """C2; (0, 2) is clipped at 1.28 and (1, 3) at 0.8; a dual clip of 10 binds nowhere."""
    more = [*DUAL, "plugins.dual_clip.c=10"] if dual else []
    words = ["algo=[stare,dual_clip]" if dual else ON[0], *ON[1:], *more, "plugins.stare.variant=C2"]
    active, step = begun(*words, step=worked())
    (omega,) = active.hooks.token_weights(batch=step.batch, out=step.out)
    found = omega * active.hooks.policy_loss(batch=step.batch, out=step.out).detach()
    expected = {(0, 2): -1.219362, (3, 0): -1.052815, (5, 1): -0.523175, (1, 3): 0.623537, (7, 2): 1.915737}
    assert {place: float(found[place]) for place in expected} == pytest.approx(expected, abs=1e-6)
    if dual:
        assert loss(*words, step=worked())[0] == pytest.approx(-0.064624, abs=1e-6)


def test_entropy_and_sets_of_the_worked_step_are_logged():
    """H = 19.0 / 34; L+ holds surprisals 1.5, 2.5 and 3.0; the gate was on in the first of two steps."""
    active, step = begun(*ON, step=worked())
    seen = logged(active.plugins["stare"])
    assert seen["entropy"] == pytest.approx(0.558824, abs=1e-6)
    assert (seen["gate"], seen["duty"], seen["entropy_missing"]) == (1.0, 1.0, 0.0)
    assert (seen["reweight_w"], seen["reweight_m"]) == (1.1, 0.9)
    assert seen["selected"] == pytest.approx(3 / 34, abs=1e-12)
    assert seen["surprisal"] == pytest.approx(7.0 / 3, abs=1e-12)
    higher = replace(step.rollouts, entropy=step.rollouts.entropy + 1)
    active.hooks.before_update(rollouts=higher, rewards=step.rewards, advantages=step.batch.advantages, run=None)
    assert logged(active.plugins["stare"])["duty"] == 0.5


@pytest.mark.parametrize(
    "share, positive, negative",
    [
        (0.05, [(3, 0), (5, 1)], [(1, 3)]),
        (0.1, RARE, RARE_NEGATIVE),  # 22 and 12 tokens: k = 3 and 2
        (0.2, [(0, 2), (3, 0), (5, 0), (5, 1), (6, 3)], [(1, 3), (2, 1), (7, 2)]),
    ],
)
def test_selection_of_the_worked_step(share, positive, negative):
    omega = weights(*ON, "plugins.stare.variant=C2", f"plugins.stare.top_p_ratio={share}", step=worked())
    assert places(omega == 1.1) == positive
    assert places(omega == 0.9) == negative
    assert int((omega != 1).sum()) == len(positive) + len(negative)


@pytest.mark.parametrize(
    "variant, letters",
    [
        ("O1", "W11 1"), ("O4", "11 1M"), ("attenuate_Upos", "1M 11"), ("amplify_Uneg", "11 W1"),
        ("C1", "W1 W1"), ("C2", "W1 1M"), ("C3", "1M W1"), ("C4", "1M 1M"),
    ],
)  # fmt: skip
def test_the_quadrants_of_a_variant(variant, letters):
    """Section 3.7's columns L+, U+, U-, L- on the worked step."""
    step = worked()
    on = {**dict(zip(("L+", "U+", "U-", "L-"), letters.replace(" ", ""), strict=True)), "masked": "1"}
    omega = weights(*ON, f"plugins.stare.variant={variant}", "plugins.stare.reweight_w=1.5", step=step)
    for row in range(8):
        for t in range(5):
            positive, live = row in (0, 3, 4, 5, 6), bool(step.batch.mask[row, t])
            rare = (row, t) in RARE + RARE_NEGATIVE
            letter = on[("L" if rare else "U") + ("+" if positive else "-")] if live else "1"
            assert float(omega[row, t]) == {"W": 1.5, "M": 0.9, "1": 1.0}[letter], (row, t)


def test_the_table_has_all_variants_of_the_paper():
    assert sorted(TABLE) == ["C1", "C2", "C3", "C4", "O1", "O4", "amplify_Uneg", "attenuate_Upos"]


# --- off is GRPO, on is GRPO with factors (7.1: 1, 2, 3, 6, 8) ------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["target_entropy=0.5"],  # the gate is off
        ["reweight_w=1", "reweight_m=1"],
        ["top_p_ratio=0"],
        ["enabled=false"],
    ],
)
@pytest.mark.parametrize("variant", ["O1", "C2"])
@pytest.mark.parametrize("scope", ["batch", "micro"])
def test_off_is_grpo_bit_for_bit(options, variant, scope):
    plain, gradient = loss(*GRPO, step=worked())
    options = [f"plugins.stare.{o}" for o in [f"variant={variant}", f"quantile_scope={scope}", *options]]
    value, found = loss(*ON, *options, step=worked())
    assert value == plain
    assert torch.equal(found, gradient)
    assert loss(*ON, f"plugins.stare.variant={variant}", step=worked())[0] != plain


def test_switched_off_it_answers_no_hook_and_needs_nothing():
    """A hook alone would make the core measure log-probabilities, whose rounding differs from a ratio of exactly 1."""
    config, active = compose("algo=stare", "plugins.stare.enabled=false", "plugins.stare.w_star_every=1")
    assert "stare" not in {name for hook, names in active.answering().items() if hook != "validate" for name in names}
    assert not active.needs
    assert active.hooks.minibatch.get_hookimpls() == []
    assert active.plugins["stare"].controls == frozenset()


@pytest.mark.parametrize("variant", ["O1", "C2"])
def test_gradients_at_ratio_one_are_those_of_grpo_times_the_weight(variant):
    """-omega A / N, N = 34: exactly W on L+, M on L-, 1 elsewhere; no gradient comes through omega or s."""
    _, plain = loss(*GRPO, step=worked(on_policy=True))
    _, found = loss(
        *ON, f"plugins.stare.variant={variant}", "plugins.stare.reweight_w=1.5", step=worked(on_policy=True)
    )
    A = compose(*GRPO)[1].hooks.advantage(rollouts=worked().rollouts, rewards=worked().rewards, run=None)
    factor = torch.ones(8, 5, dtype=torch.float64)
    for place in RARE:
        factor[place] = 1.5
    for place in RARE_NEGATIVE if variant == "C2" else []:
        factor[place] = 0.9
    mask = worked().batch.mask
    torch.testing.assert_close(found, (-factor * A[:, None] / 34).masked_fill(~mask, 0), rtol=0, atol=1e-12)
    torch.testing.assert_close(found, factor * plain, rtol=0, atol=1e-15)
    assert torch.equal(found.sign(), plain.sign())
    if variant == "O1":
        assert torch.equal(found[A <= 0], plain[A <= 0])


def test_weights_carry_no_gradient():
    active, step = begun(*ON, "plugins.stare.quantile_scope=micro", step=worked())
    (omega,) = active.hooks.token_weights(batch=step.batch, out=step.out)
    assert not omega.requires_grad and step.out.logprobs.requires_grad


@pytest.mark.parametrize("surrogate", ["grpo", "dual_clip"])
def test_a_weight_on_the_loss_is_a_weight_on_the_advantage(surrogate):
    """Also where the clip binds, and the dual clip (c = 1.3 below the ratio of (7, 2), exp(0.35) = 1.42)."""
    dual = [*DUAL, "plugins.dual_clip.c=1.3"] if surrogate == "dual_clip" else []
    algo = "algo=[stare,dual_clip]" if dual else "algo=stare"
    base = ["algo=dual_clip"] if dual else ["algo=grpo"]
    options = ["plugins.stare.variant=C2", "plugins.stare.reweight_w=3"]
    omega = weights(*ON, *options, step=worked())
    A = compose(*GRPO)[1].hooks.advantage(rollouts=worked().rollouts, rewards=worked().rewards, run=None)[:, None]
    value, gradient = loss(algo, *ON[1:], *options, *dual, step=worked())
    scaled, found = loss(*base, *GRPO, *dual, step=worked(), advantages=omega * A)
    assert value == pytest.approx(scaled, abs=1e-12)
    torch.testing.assert_close(gradient, found, rtol=0, atol=1e-12)
    assert float(gradient[7, 2]) != 0.0 if not dual else float(gradient[7, 2]) == 0.0


# --- selection (7.1: 4, 5) ------------------------------------------------------------------------------------------

ROWS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([-1.5, -0.5, 0.0, 0.25, 1.0]), st.integers(0, 10**6)),
    min_size=1, max_size=8,
)  # fmt: skip


def ragged(rows, ties=False):
    """(length, advantage, seed) per row -> a step and its advantages [R, T] float64."""
    current = torch.zeros(len(rows), 6, dtype=torch.float64)
    for row, (_, _, seed) in enumerate(rows):
        draw = torch.rand(6, generator=torch.Generator().manual_seed(seed + row), dtype=torch.float64)
        current[row] = -(draw * 3).round(decimals=0 if ties else 12)
    tables = {name: current for name in ("logprobs", "old_logprobs", "ref_logprobs")} | {"entropy": 0.1 - 0.1 * current}
    step = assemble([n for n, _, _ in rows], [0] * len(rows), [1.0] * len(rows), tables, current)
    return step, torch.tensor([a for _, a, _ in rows], dtype=torch.float64)[:, None].expand(-1, 6)


def chosen(step, advantages, share, scope="batch"):
    """L+ and L- with the gate on."""
    plugin = stare(variant=Variant.C2, top_p_ratio=share, reweight_w=2.0, reweight_m=0.5, quantile_scope=Scope[scope])
    omega = plugin.omega(replace(step.batch, advantages=advantages), step.out)
    return omega == 2.0, omega == 0.5


@given(ROWS, st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.05, 0.1, 0.2, 1.0])), st.booleans())
@settings(max_examples=80, deadline=None)
def test_exactly_k_tokens_of_each_sign_and_the_most_surprising_ones(rows, share, ties):
    step, advantages = ragged(rows, ties)
    s = -step.out.logprobs.detach()
    for found, members in zip(chosen(step, advantages, share), (advantages > 0, advantages < 0), strict=True):
        members = members & step.batch.mask
        n = int(members.sum())
        k = 0 if n == 0 or share == 0 else min(n, max(1, math.floor(n * share + 0.999999)))
        assert int(found.sum()) == k
        assert not bool((found & ~members).any())
        rest = members & ~found
        if k and rest.any():
            assert float(s[found].min()) >= float(s[rest].max())
            for place in places(found):  # ties go to the lowest place in row-major order
                assert all(float(s[other]) < float(s[place]) or other > place for other in places(rest))


@given(ROWS, st.randoms(), st.sampled_from([math.inf, -math.inf, math.nan, 1e30, -1e30]))
@settings(max_examples=60, deadline=None)
def test_padding_garbage_and_the_order_of_rows_change_nothing(rows, random, garbage):
    step, advantages = ragged(rows)
    plain = chosen(step, advantages, 0.3)
    disturbed = garble(widen(step, 2), garbage)
    wide = torch.nn.functional.pad(advantages, (0, 2), value=1.0)  # a masked advantage selects nothing either
    for found, expected in zip(chosen(disturbed, wide, 0.3), plain, strict=True):
        assert torch.equal(found, torch.nn.functional.pad(expected, (0, 2)))
    order = list(range(len(rows)))
    random.shuffle(order)
    for found, expected in zip(chosen(select(step, order), advantages[order], 0.3), plain, strict=True):
        assert torch.equal(found, expected[order])


def test_the_sign_is_that_of_the_tokens_own_advantage():
    """Token-level advantages: the last token of a good completion is bad, its middle neither."""
    A = torch.zeros(8, 5, dtype=torch.float64)
    A[0] = torch.tensor([1.0, 1.0, 0.0, 1.0, -1.0])
    omega = weights(*ON, "plugins.stare.variant=C2", step=worked(), advantages=A)
    assert places(omega == 1.1) == [(0, 3)]  # s = .10 .02 .30 among the positive ones; 1.5 has advantage 0
    assert places(omega == 0.9) == [(0, 4)]


# --- splits of the step (7.1: 9) ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        [[0, 1, 2, 3, 4, 5, 6, 7]],
        [[1, 2, 7], [0, 3, 4, 5, 6]],  # one worker without a positive token
        [[7], [2, 1], [6, 0, 4], [5, 3]],
    ],
)
def test_workers_of_any_size_give_the_loss_of_one(parts):
    whole, gradient = loss(*ON, "plugins.stare.variant=C2", step=worked())
    active, step = begun(*ON, "plugins.stare.variant=C2", step=worked())
    logprobs, total = leaf(step.out.logprobs), 0.0
    cycle = Cycle(step.rollouts, step.rewards, step.batch.advantages, [], tables=dict(step.batch.tables))
    for rows in parts:
        batch = batch_of(cycle, rows, torch.device("cpu"))
        out = Output(logprobs[rows, : batch.mask.shape[1]])
        total = total + objective(active.hooks, batch, out, "token_mean", denominators(step.batch.mask, 5), False)
    assert float(total.detach()) == pytest.approx(whole, abs=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total, logprobs)[0], gradient, rtol=0, atol=1e-12)


def test_micro_scope_selects_in_each_micro_batch():
    """Rows 1, 2, 7 have no positive token; rows 0, 4 (10 tokens) and 3, 5, 6 (12) then take 1 and 2 of their own."""
    active, step = begun(*ON, "plugins.stare.quantile_scope=micro", step=worked())
    assert not step.batch.tables
    cycle = Cycle(step.rollouts, step.rewards, step.batch.advantages, [])
    found = {}
    for rows in ([1, 2, 7], [0, 4], [3, 5, 6]):
        batch = batch_of(cycle, rows, torch.device("cpu"))
        (omega,) = active.hooks.token_weights(batch=batch, out=Output(step.out.logprobs[rows, : batch.mask.shape[1]]))
        found[tuple(rows)] = [(rows[row], t) for row, t in places(omega == 1.1)]
    assert found == {(1, 2, 7): [], (0, 4): [(0, 2)], (3, 5, 6): [(3, 0), (5, 1)]}
    alone = batch_of(cycle, [4], torch.device("cpu"))  # one token at least: more than P of a small micro-batch
    (omega,) = active.hooks.token_weights(batch=alone, out=Output(step.out.logprobs[[4]]))
    assert places(omega == 1.1) == [(0, 1)]


@pytest.mark.parametrize("scope", list(Scope))
@pytest.mark.parametrize("source, expected", [(Source.current, (0, 0)), (Source.old, (0, 1))])
def test_surprisal_is_that_of_the_current_policy_or_of_the_old_one(scope, source, expected):
    """Current -2 -1 -1, before the update -1 -3 -1."""
    rows = {"old_logprobs": table([[-1, -3, -1]], 3), "entropy": table([[0.1] * 3], 3)}
    rows |= {"logprobs": rows["old_logprobs"], "ref_logprobs": rows["old_logprobs"]}
    step = assemble([3], [0], [1.0], rows, table([[-2, -1, -1]], 3))
    options = [f"plugins.stare.quantile_scope={scope.name}", f"plugins.stare.surprisal_from={source.name}"]
    assert places(weights(*ON, *options, step=step, advantages=[1.0]) == 1.1) == [expected]


# --- gate and controller (6.4, 7.1: 7, 10) ---------------------------------------------------------------------------


def test_the_gate_is_strict():
    step = worked()
    step = step._replace(rollouts=replace(step.rollouts, entropy=0.5 * step.batch.mask.double()))
    assert float(weights("algo=stare", "plugins.stare.target_entropy=0.5", step=step).max()) == 1.0
    assert float(weights("algo=stare", "plugins.stare.target_entropy=0.5000001", step=step).max()) == 1.1


def test_entropy_is_a_mean_over_tokens_of_all_rows_whatever_their_advantage():
    """Rows of 5 and 1 tokens at 0.2 and 0.8 nats: (1 + 0.8) / 6 = 0.3, not 0.5; both have equal rewards."""
    tables = {name: torch.zeros(2, 5) - 1 for name in ("logprobs", "old_logprobs", "ref_logprobs")}
    entropy = table([[0.2] * 5, [0.8, 9, 9, 9, 9]])
    step = assemble([5, 1], [0, 0], [1.0, 1.0], tables | {"entropy": entropy}, torch.zeros(2, 5) - 1)
    active, _ = begun("algo=stare", step=step)
    assert logged(active.plugins["stare"])["entropy"] == pytest.approx(0.3, abs=1e-12)


@pytest.mark.parametrize(
    "gate, target, expected",
    [
        ("sample", 0.9, [(0, 2), (3, 0), (5, 0), (5, 1), (6, 3)]),
        ("sample", 0.5, [(6, 3)]),  # row 6: 2.25 / 5 nats; row 0: 2.5 / 5 is not below
        ("token", 0.9, [(5, 0)]),  # 0.85 nats; 1 and more at the other four
        ("token", 0.85, []),
    ],
)
def test_finer_gates_look_at_the_completion_or_at_the_position(gate, target, expected):
    """P = 0.2: L+ = (0,2) (3,0) (5,0) (5,1) (6,3)."""
    options = ["top_p_ratio=0.2", f"gate={gate}", f"target_entropy={target}"]
    omega = weights("algo=stare", *GRPO, *(f"plugins.stare.{option}" for option in options), step=worked())
    assert places(omega == 1.1) == expected
    assert int((omega != 1).sum()) == len(expected)


def run_controller(plugin, entropies):
    rows = []
    for h in entropies:
        plugin.control(h)
        rows.append((plugin.gate, plugin.W, plugin.M))
    return [list(column) for column in zip(*rows, strict=True)]


def test_adaptive_weights_of_the_worked_sequence():
    plugin = stare(adaptive=True)
    gate, amplify, attenuate = run_controller(plugin, [0.45, 0.28, 0.10, 0.30, 0.31, math.nan, 0.05])
    assert gate == [False, True, True, False, False, False, True]
    assert amplify == pytest.approx([1.09, 1.10, 1.11, 1.11, 1.10, 1.10, 1.11], abs=1e-12)
    assert attenuate == pytest.approx([0.91, 0.90, 0.89, 0.89, 0.90, 0.90, 0.89], abs=1e-12)
    assert plugin.entropy == 0.05
    _, W, M = run_controller(stare(adaptive=True, reweight_w=1.495, reweight_m=0.505), [0.1, 0.1])
    assert (W, M) == ([1.5, 1.5], [0.5, 0.5])
    _, W, M = run_controller(stare(adaptive=True, reweight_w=1.005, reweight_m=0.995), [0.4, 0.4])
    assert (W, M) == ([1.0, 1.0], [1.0, 1.0])


def test_weights_stay_unless_adaptive():
    assert run_controller(stare(), [0.1, 0.5])[1:] == [[1.1, 1.1], [0.9, 0.9]]
    assert run_controller(stare(adaptive=True, alpha=0.0), [0.1, 0.5])[1:] == [[1.1, 1.1], [0.9, 0.9]]


def test_the_controller_moves_before_the_loss_of_its_own_step():
    omega = weights(*ON, "plugins.stare.adaptive=true", "plugins.stare.alpha=0.25", step=worked())
    assert places(omega == 1.35) == RARE


@pytest.mark.parametrize("broken", ["nan", "inf", "empty"])
def test_an_entropy_that_is_not_a_number_leaves_the_state_and_is_reported(broken):
    active, step = begun(*ON, "plugins.stare.adaptive=true", step=worked())
    plugin = active.plugins["stare"]
    before = {name: value for name, value in plugin.state_dict().items() if name not in ("steps", "opened")}
    plugin.logged.clear()
    rollouts = step.rollouts
    if broken == "empty":
        rollouts = replace(rollouts, completion_mask=torch.zeros_like(rollouts.completion_mask))
    else:
        rollouts = replace(
            rollouts,
            entropy=rollouts.entropy.index_put(
                (torch.tensor(2), torch.tensor(1)), torch.tensor(float(broken)).double()
            ),
        )
    active.hooks.before_update(rollouts=rollouts, rewards=step.rewards, advantages=step.batch.advantages, run=None)
    assert before.items() <= plugin.state_dict().items()
    seen = logged(plugin)
    assert seen["entropy_missing"] == 1.0 and "entropy" not in seen and seen["gate"] == 1.0


def test_state_goes_through_a_checkpoint():
    first = stare(adaptive=True)
    run_controller(first, [0.45, 0.28, 0.10])
    second = stare(adaptive=True)
    second.load_state_dict(dict(first.state_dict()))
    assert second.state_dict() == first.state_dict()
    assert first.state_dict() == {
        "gate": True, "W": pytest.approx(1.11), "M": pytest.approx(0.89), "entropy": 0.10, "steps": 3, "opened": 2,
    }  # fmt: skip
    assert run_controller(second, [0.1, 0.5]) == run_controller(first, [0.1, 0.5])
    fresh = stare()
    fresh.load_state_dict({})  # the plugin was not there when the checkpoint was written
    assert fresh.gate is True and fresh.entropy is None


# --- theory and W* (6.1, 6.2, 7.1: 11) ------------------------------------------------------------------------------

FIVE = [
    [0.60, 0.25, 0.10, 0.05], [0.60, 0.25, 0.10, 0.05], [0.85, 0.05, 0.05, 0.05], [0.40, 0.30, 0.20, 0.10], [0.70, 0.10, 0.10, 0.10],
]  # fmt: skip
SAMPLED, SIGNS = [0, 2, 0, 1, 3], [1.0, 1.0, 1.0, -1.0, -1.0]


def entropies(logits):
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def covariance(probabilities):
    return (probabilities**2 * (probabilities.log() + entropies(probabilities.log())[:, None])).sum(-1)


def tabular(logits, tokens):
    """One token per row, each position with its own logits [n, V]."""
    logp = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])  # [n, 1]
    tables = {name: logp for name in ("logprobs", "old_logprobs", "ref_logprobs")}
    return assemble(
        [1] * len(tokens),
        [0] * len(tokens),
        [1.0] * len(tokens),
        tables | {"entropy": entropies(logits)[:, None]},
        logp,
    )


def measured(logits, tokens, advantages, **options):
    """What the plugin logs of Phi and W* on positions with the given logits."""
    plugin, step = stare(w_star_every=1, **options), tabular(logits, tokens)
    rows = list(range(len(tokens)))
    parts = [
        (rows[:2], step.rollouts.select(rows[:2])),
        (rows[2:], step.rollouts.select(rows[2:])),
    ]  # two micro-batches
    values = covariance(logits.softmax(-1))[:, None]
    answers = iter([values[rows[:2]], values[rows[2:]]])
    run = SimpleNamespace(
        step=0, mine=lambda rollouts, rows: parts, sum=lambda tensor: tensor,
        policy=SimpleNamespace(covariance=lambda part: next(answers)),
    )  # fmt: skip
    plugin.before_update(rollouts=step.rollouts, advantages=torch.tensor(advantages)[:, None], run=run)
    return logged(plugin)


def direction(logits, tokens, advantages, *options):
    """eta -> mean entropy after the ascent step eta along -N times the gradient of STARE's loss, in logits."""
    options = ["algo=stare", "plugins.grpo.aggregation=token_mean", "plugins.stare.target_entropy=9", *options]
    _, gradient = loss(*options, step=tabular(logits, tokens), advantages=advantages)
    onehot = torch.nn.functional.one_hot(torch.tensor(tokens), logits.shape[1])
    move = -len(tokens) * gradient * (onehot - logits.softmax(-1))
    return lambda eta: float(entropies(logits + eta * move).mean())


def slope(after, eta=1e-4):
    return (after(eta) - after(-eta)) / (2 * eta)


@pytest.mark.parametrize("token, phi", list(enumerate([0.165024, -0.236644, -0.275296, -0.246480])))
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_phi_is_minus_the_change_of_the_entropy(token, phi, sign):
    """6.1: by central differences through the loss's own gradient, W = 1; and the sign of Phi as the plugin sees it."""
    logits = torch.tensor([FIVE[0]], dtype=torch.float64).log()
    assert slope(direction(logits, [token], [sign], "plugins.stare.reweight_w=1")) == pytest.approx(
        -sign * phi, abs=1e-6
    )
    both = torch.cat([logits] * 3)
    seen = measured(both, [token] * 3, [1.0, 0.0, 0.0])
    assert seen["raising"] == (phi < 0)
    if phi < 0:  # only L+ pulls: Lambda = -Gamma, so that W* = 0
        assert seen["w_star"] == pytest.approx(0.0, abs=1e-9)
    else:
        assert "w_star" not in seen


@pytest.mark.parametrize(
    "options, expected",
    [
        (["reweight_w=1"], -0.072440), (["reweight_w=1.1"], -0.066934), (["reweight_w=2"], -0.017380),
        (["reweight_w=2.315668"], 0.0), (["variant=C2"], -0.059306),
    ],
)  # fmt: skip
def test_change_of_the_mean_entropy_of_five_positions(options, expected):
    """6.2: L+ = {position 1}, L- = {position 4}."""
    logits = torch.tensor(FIVE, dtype=torch.float64).log()
    after = direction(logits, SAMPLED, SIGNS, *(f"plugins.stare.{option}" for option in options))
    assert slope(after) == pytest.approx(expected, abs=1e-6)


def test_critical_weight_of_five_positions():
    """6.2: Lambda = 0.362198, Gamma = 0.275296; L+ = {position 1} has Phi < 0."""
    seen = measured(torch.tensor(FIVE, dtype=torch.float64).log(), SAMPLED, SIGNS)
    assert seen["w_star"] == pytest.approx(2.315668, abs=1e-6)
    assert seen["raising"] == 1.0


@given(st.integers(0, 10**6))
@settings(max_examples=4, deadline=None)
def test_the_entropy_turns_around_at_the_critical_weight(seed):
    """A finite step on a random tabular policy: the measured change of the entropy flips between 0.9 and 1.1 W*."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0].tolist()
    advantages = torch.randn(12, generator=generator, dtype=torch.float64).tolist()
    W = measured(logits, tokens, advantages).get("w_star", 0.0)
    assume(1.2 < W < 50)

    def change(weight):
        after = direction(logits, tokens, advantages, f"plugins.stare.reweight_w={weight}")
        return after(1e-4) - after(0.0)

    assert change(0.9 * W) < 0 < change(1.1 * W)


def test_w_star_is_measured_on_the_policy_at_its_interval():
    """The tiny policy's own tables: Phi of each completion token from the full law at its position."""
    options = ["algo=stare", "plugins.stare.w_star_every=3"]
    config, active = compose(*options)
    assert active.needs == {"entropy", "old_logprobs"}
    run, plugin = Context(config, active, step=3), active.plugins["stare"]
    step = fixture(torch.float32)
    out = run.policy.output(step.rollouts, entropy=True)
    rollouts = replace(step.rollouts, old_logprobs=out.logprobs.detach(), entropy=out.entropy.detach())
    A = step.batch.advantages
    plugin.before_update(rollouts=rollouts, advantages=A, run=run)
    seen = logged(plugin)

    falls, tokens = torch.zeros(A.shape, dtype=torch.float64), []
    for row, length in enumerate(rollouts.lengths.tolist()):
        ids = torch.tensor([*rollouts.prompt_ids[row], *rollouts.completion_ids[row, :length]])
        logits = run.policy.model(input_ids=ids[None]).logits[0].double().detach()
        law = logits[len(rollouts.prompt_ids[row]) - 1 : -1].softmax(-1)  # [length, V]
        p = law.gather(1, ids[len(rollouts.prompt_ids[row]) :, None])[:, 0]
        phi = p * (p.log() + entropies(law.log())) - covariance(law)
        falls[row, :length] = A[row, :length] * phi
        tokens += [(float(p[t]), row, t) for t in range(length) if A[row, t] > 0]
    rare = sorted(tokens)[: math.ceil(0.1 * len(tokens))]
    rise = -sum(float(falls[row, t]) for _, row, t in rare)
    assert rise > 0
    assert seen["w_star"] == pytest.approx(1 + float(falls.sum()) / rise, abs=1e-4)  # float32 in the policy
    assert seen["raising"] == sum(float(falls[row, t]) < 0 for _, row, t in rare) / len(rare)

    plugin.logged.clear()
    run.step = 4
    plugin.before_update(rollouts=rollouts, advantages=A, run=run)
    assert "w_star" not in logged(plugin)


# --- composition, options, conformance ------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["kl_cov", "clip_cov", "entropy_mask"])
def test_methods_that_choose_the_same_tokens_are_refused(other):
    assert len(Stare.conflicts[other]) > 20
    with pytest.raises(UserError, match="stare.*" + other + "|" + other + ".*stare"):
        compose("algo=stare", f"+plugins.{other}={{}}")


def test_another_controller_of_the_entropy_is_refused():
    composed = {"stare": {}, "second": {}}
    found = {**installed(), "second": installed()["stare"]}
    rest = {name: {} for name in ("grpo", "iid", "native", "full", "answer")}
    with pytest.raises(UserError, match="second and stare both control the entropy"):
        activate({**rest, **composed}, found)
    activate({**rest, "stare": {}, "second": {"enabled": False}}, found)


@pytest.mark.parametrize("variant", list(Variant))
def test_what_the_authors_did_not_release_is_called_experimental(variant):
    notice = stare(variant=variant).validate()
    assert (notice is None) == (variant.name in ("O1", "C2"))
    assert notice is None or (f"variant={variant.name}" in notice and "experimental" in notice)
    assert "gate=token" in stare(variant=variant, gate=Gate.token).validate()
    assert stare(variant=variant, gate=Gate.sample, enabled=False).validate() is None


def test_the_notice_reaches_the_user():
    config, active = compose("algo=stare", "plugins.stare.variant=C3", "plugins.stare.gate=sample")
    notices = [notice for notice in active.hooks.validate(config=config, active=active) if notice]
    assert notices == ["stare: variant=C3, gate=sample is experimental; the authors released O1 and C2 with gate=batch"]


@pytest.mark.parametrize(
    "options",
    [
        {"top_p_ratio": 1.5}, {"top_p_ratio": -0.1}, {"reweight_w": 0.9}, {"reweight_m": 1.1}, {"reweight_m": -0.1}, {"target_entropy": -1.0},
        {"alpha": -0.01}, {"m_min": 2.0}, {"w_star_every": -1}, {"top_p_ratio": math.nan},
        {"reweight_w": 6.0, "adaptive": True},  # would jump to w_max in the first step
        {"reweight_m": 0.4, "adaptive": True},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Stare.Config(**options)


@pytest.mark.parametrize(
    "options",
    [
        [], ["variant=C2", "target_entropy=9"], ["variant=C1", "target_entropy=9", "gate=sample"], ["gate=token", "adaptive=true"],
        ["target_entropy=9", "surprisal_from=old", "w_star_every=1"], ["enabled=false"],
    ],
)  # fmt: skip
def test_conformance(options):
    check_plugin("stare", "algo=stare", *(f"plugins.stare.{option}" for option in options))


def test_conformance_of_the_micro_scope():
    """By its nature the split into micro-batches counts."""
    options = ["plugins.stare.quantile_scope=micro", "plugins.stare.target_entropy=9"]
    done = check_plugin("stare", "algo=stare", *options, skip=["micro-batches", "processes"])
    assert "row order" in done
    with pytest.raises(AssertionError, match="micro-batches"):
        check_plugin("stare", "algo=stare", *options)
