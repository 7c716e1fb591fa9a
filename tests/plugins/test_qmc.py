"""Coupled sampling: the sheet's worked chain, exact laws on the real engine, keys, designs, and their estimators."""

from dataclasses import replace
from itertools import product
from math import ceil, floor, inf, log2
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import gpt2, qwen
from grpozoo_plugins.hf import Hf
from grpozoo_plugins.qmc import BELOW_ONE, Design, Order, Qmc, Siblings, first, net, shifted
from scipy.stats import chi2

from grpozoo import Prompt, Request, UserError, concatenate
from grpozoo.compose.plugins import activate
from grpozoo.evaluate import best_of_sets, bound_at_k
from grpozoo.rng import stream
from grpozoo.rollout import decode
from grpozoo.sampling import Choice, Law
from grpozoo.testing import check_plugin, compose
from grpozoo.testing.context import tiny_policy

UNLIKELY = 1e-6  # chance of a false alarm of a chi-square test; its numbers are the same in every call
START = (0.5, 0.3, 0.2)  # the chain of section 6.1: first token, and second token after each
AFTER = ((0.2, 0.5, 0.3), (0.6, 0.1, 0.3), (0.25, 0.25, 0.5))


def sampler(**options):
    return Siblings(Qmc.Config(**options))


def request(count=8, start=0, name="p", group=0, tag="train"):
    return Request(Prompt(name, text="5 6"), group, tuple(range(start, start + count)), tag)


def started(requests, seed=0, step=1, max_tokens=16, **options):
    made = sampler(**options)
    made.start(requests if isinstance(requests, list) else [requests], seed, step, max_tokens)
    return made


def walk(made, law, tokens):
    """Token ids [rows, tokens] under law(prefix) -> probabilities, by the shipped step."""
    rows = torch.arange(len(made.u))
    ids = torch.zeros(len(rows), 0, dtype=torch.int64)
    for position in range(tokens):
        p = torch.tensor([law(tuple(prefix)) for prefix in ids.tolist()], dtype=torch.float64)
        ids = torch.cat([ids, made.next(Choice(p.log().float()), rows, position)[:, None]], 1)
    return ids


def chain(prefix):
    return AFTER[prefix[0]] if prefix else START


def decoded(u, law=chain, tokens=2, **options):
    """Completions of rows whose first coordinates are given, and the sampler afterwards."""
    made = started(request(len(u)), **options)
    made.u = torch.tensor(u, dtype=torch.float64)
    return [tuple(row) for row in walk(made, law, tokens).tolist()], made


@pytest.mark.parametrize("design", [design.name for design in Design])
def test_conformance(design):
    done = check_plugin("qmc", "sampler=qmc", f"plugins.qmc.design={design}")
    assert {"law", "calls"} <= set(done)


@pytest.mark.parametrize("options", [["blocks=2"], ["order=id"], ["order=head"], ["refresh_bits=0.5"], ["sobol_dims=1", "design=token_sobol"]])  # fmt: skip
def test_every_option_keeps_the_law(options):
    check_plugin("qmc", "sampler=qmc", *(f"plugins.qmc.{option}" for option in options))


# Section 6: the worked numbers


LATTICE = [0.07, 0.32, 0.57, 0.82]


@pytest.mark.parametrize(
    "order, tokens, final",
    [
        ("desc", [(0, 1), (0, 2), (1, 0), (2, 2)], [0.28, 0.466667, 0.388889, 0.2]),
        ("id", [(0, 0), (0, 1), (1, 0), (2, 0)], [0.7, 0.88, 0.388889, 0.4]),
    ],
)
def test_the_worked_chain_token_by_token(order, tokens, final):
    found, made = decoded(LATTICE, order=Order[order])
    assert found == tokens
    assert made.u.tolist() == pytest.approx(final, abs=1e-6)
    p = [START[a] * AFTER[a][b] for a, b in tokens]
    assert made.bits.tolist() == pytest.approx([-log2(value) for value in p], abs=1e-6)  # (0, 1): 1 + 1 bits


def test_the_worked_chain_after_one_token():
    found, made = decoded(LATTICE, tokens=1)
    assert found == [(0,), (0,), (1,), (2,)]
    assert made.u.tolist() == pytest.approx([0.14, 0.64, 0.233333, 0.1], abs=1e-6)
    assert made.bits[0] == pytest.approx(1, abs=1e-6)


def fixed(permutation=None, numbers=None):
    """A generator that draws what it is told to."""
    return SimpleNamespace(permutation=lambda k: np.array(permutation), random=lambda k=None: np.array(numbers))


def test_the_numbers_of_the_designs():
    u, index = first(Design.stratified, 4, fixed([2, 0, 3, 1], [0.2, 0.9, 0.4, 0.7]))
    assert u.tolist() == pytest.approx([0.55, 0.225, 0.85, 0.425], abs=1e-12) and index.tolist() == [2, 0, 3, 1]
    tokens, made = decoded(u.tolist())
    assert tokens == [(1, 0), (0, 1), (2, 2), (0, 0)]
    assert made.u.tolist() == pytest.approx([0.277778, 0.9, 0.5, 0.25], abs=1e-6)
    assert first(Design.lattice, 4, fixed(numbers=0.57))[0].tolist() == pytest.approx([0.57, 0.82, 0.07, 0.32])
    assert first(Design.vilnis, 3, fixed(numbers=0.5))[0].tolist() == pytest.approx([0.75, 0.0, 0.25])
    u, index = first(Design.antithetic, 3, fixed(numbers=[0.0, 0.3]))
    assert u.tolist() == pytest.approx([0, BELOW_ONE, 0.3], abs=1e-12) and index.tolist() == [0, 1, 2]


def test_numbers_stay_below_one():
    """(k - 1 + largest float below 1) / k rounds to 1."""
    u, _ = first(Design.stratified, 8, fixed(range(8), [BELOW_ONE] * 8))
    assert u.max() == BELOW_ONE
    xi = torch.tensor([BELOW_ONE], dtype=torch.float64)
    assert shifted(torch.tensor([2**30 - 1]), torch.tensor([0]), xi).item() == BELOW_ONE


def test_a_digital_shift_of_the_sobol_net():
    z = net(4, 3)
    points = [[0, 0, 0], [0.5, 0.5, 0.5], [0.75, 0.25, 0.25], [0.25, 0.75, 0.75]]
    assert (z / 2**30).tolist() == points
    expected = [
        [0.114978, 0.919825, 0.517401], [0.614978, 0.419825, 0.017401],
        [0.864978, 0.669825, 0.767401], [0.364978, 0.169825, 0.267401],
    ]  # fmt: skip
    found = shifted(z, torch.tensor([123456789, 987654321, 555555555]), torch.zeros(4, 3, dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def pieces(edges, width):
    """The intervals between the edges, folded into [0, width): (midpoints, lengths)."""
    folded = sorted({0.0, width, *(edge % width for edge in edges)})
    ends = np.array([edge for edge in folded if 0 <= edge <= width])
    keep = np.diff(ends) > 1e-9
    return ((ends[1:] + ends[:-1]) / 2)[keep], np.diff(ends)[keep]


EDGES = [0, 0.25, 0.4, 0.5, 0.68, 0.77, 0.8, 0.9, 0.95, 1]  # of the leaves, in the order desc


def lattice_outcomes(right, k):
    """(length, verdicts in the order of the lattice) for each piece of D in [0, 1 / k); D + j / k only turns the rows."""
    for middle, length in zip(*pieces(EDGES, 1 / k), strict=True):
        leaves, _ = decoded([middle + i / k for i in range(k)])
        yield length * k, [float(leaf in right) for leaf in leaves]


def strata(right, k):
    """The chance of each stratum to be right."""
    middles, lengths = pieces([*EDGES, *(j / k for j in range(k))], 1.0)
    leaves, _ = decoded(middles.tolist())
    good = [length * (leaf in right) for leaf, length in zip(leaves, lengths, strict=True)]
    return [k * sum(g for g, middle in zip(good, middles, strict=True) if j <= middle * k < j + 1) for j in range(k)]


def exact_lattice(right, k):
    return sum(weight * any(verdicts) for weight, verdicts in lattice_outcomes(right, k))


def exact_stratified(right, k):
    return 1 - float(np.prod([1 - q for q in strata(right, k)]))


TABLE = [
    ({(0, 1)}, 0.25, 2, 0.4375, 0.5, 0.5, 0.5),
    ({(0, 1)}, 0.25, 4, 0.683594, 1, 1, 1),
    ({(1, 0), (2, 2)}, 0.28, 3, 0.626752, 0.67, 0.64, 0.84),
    ({(1, 0), (2, 2)}, 0.28, 4, 0.731261, 0.832, 0.72, 1),
    ({(0, 0), (1, 2), (2, 0)}, 0.24, 4, 0.666378, 0.68896, 0.48, 0.96),
    ({(0, 0), (1, 2), (2, 0)}, 0.24, 8, 0.888697, 0.955648, 0.96, 1),
]


@pytest.mark.parametrize("right, p, k, iid, stratified, lattice, bound", TABLE)
def test_exact_pass_at_k_of_the_worked_chain(right, p, k, iid, stratified, lattice, bound):
    q = strata(right, k)
    assert sum(q) / k == pytest.approx(p, abs=1e-6)
    assert 1 - (1 - sum(q) / k) ** k == pytest.approx(iid, abs=1e-6)
    assert exact_stratified(right, k) == pytest.approx(stratified, abs=1e-6)
    assert exact_lattice(right, k) == pytest.approx(lattice, abs=1e-6)
    assert bound_at_k([[1.0] * round(100 * p) + [0.0] * round(100 - 100 * p)], k) == pytest.approx(bound, abs=1e-9)


def test_the_bound_holds_for_every_set_of_right_answers_and_strata_never_lose():
    leaves = list(product(range(3), repeat=2))
    for number in range(1, 2 ** len(leaves), 37):
        right = {leaf for bit, leaf in enumerate(leaves) if number >> bit & 1}
        for k in (2, 5):
            p = sum(strata(right, k)) / k
            stratified = exact_stratified(right, k)
            assert 1 - (1 - p) ** k - 1e-9 <= stratified <= min(1, k * p) + 1e-9
            assert p - 1e-9 <= exact_lattice(right, k) <= min(1, k * p) + 1e-9


# Estimators of smaller samples


def table_of(design, order):
    k = len(order)
    return {"design": [Design[design].value] * k, "block": [0] * k, "index": order, "k": [k] * k}


OUTCOMES = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]  # by place


@pytest.mark.parametrize(
    "design, expected",
    [
        ("lattice", [0.375, 0.5, 1, 1]),  # pairs (0, 4), (1, 5), (2, 6), (3, 7): 1, 0, 0, 1
        ("stratified", [0.375, 0.625, 0.875, 1]),  # m = 2: 1 - 3/4 * 2/4
        ("token_sobol", [0.375, 0.75, 1, 1]),  # neighbouring pairs: 1, 0, 1, 1
        ("antithetic", [None, 0.75, 1, 1]),
        ("vilnis", [None, None, None, 1]),
    ],
)
def test_estimates_of_the_worked_outcomes(design, expected):
    order = [3, 0, 7, 4, 1, 6, 2, 5]  # rows as they come
    values = [[OUTCOMES[place] for place in order]]
    for m, wanted in zip((1, 2, 4, 8), expected, strict=True):
        sets = sampler().sets(table_of(design, order), 8, m)
        if wanted is None:
            assert sets == []
        else:
            assert best_of_sets(values, [sets]) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("design", [design.name for design in Design])
def test_a_size_that_does_not_divide_or_a_group_with_a_hole_has_no_estimate(design):
    made = sampler()
    assert made.sets(table_of(design, list(range(8))), 8, 3) == []
    table = {name: values[:6] for name, values in table_of(design, list(range(8))).items()}
    assert made.sets(table, 6, 2) == made.sets(table, 6, 6) == []


@pytest.mark.parametrize("right", [row[0] for row in TABLE[1::2]])
def test_the_lattices_estimates_integrate_to_the_exact_values(right):
    for k, ms in ((8, (1, 2, 4, 8)), (12, (2, 3, 4, 6, 12))):
        outcomes = list(lattice_outcomes(right, k))
        for m in ms:
            sets = [sampler().sets(table_of("lattice", list(range(k))), k, m)]
            mean = sum(weight * best_of_sets([verdicts], sets) for weight, verdicts in outcomes)
            assert mean == pytest.approx(exact_lattice(right, m), abs=1e-12)


@pytest.mark.parametrize("right", [row[0] for row in TABLE[1::2]])
def test_the_strata_estimates_integrate_to_the_exact_values(right):
    k, q = 8, strata(right, 8)
    for m in (1, 2, 4, 8):
        sets = [sampler().sets(table_of("stratified", list(range(k))), k, m)]
        mean = 0.0
        for verdicts in product((0.0, 1.0), repeat=k):
            chance = np.prod([q[j] if right else 1 - q[j] for j, right in enumerate(verdicts)])
            mean += chance and chance * best_of_sets([verdicts], sets)
        assert mean == pytest.approx(exact_stratified(right, m), abs=1e-12)


def test_aligned_blocks_of_a_sobol_net_are_shifted_copies_of_the_first():
    """So under a random shift each has the law of a smaller net."""
    z = net(16, 5)
    for m in (2, 4, 8):
        start = {tuple(point) for point in z[:m].tolist()}
        for block in z.split(m):
            assert any(
                {tuple(point) for point in (block ^ block[0] ^ z[other]).tolist()} == start for other in range(m)
            )


# Laws on the real engine


def completions(policy, requests, made, max_tokens=2, step=0):
    law = policy.law
    return decode(requests, made, law, policy, max_tokens=max_tokens, max_prompt_length=9, seed=3, step=step)


def enumerated(policy, prompt=(5, 6)):
    """pi of every completion of two tokens (one that stops at once: one token), as [V * V]."""
    V = policy.model.config.vocab_size
    with torch.no_grad():
        one = Choice(policy.law.warp(policy.model(input_ids=torch.tensor([prompt])).logits[:, -1])).probabilities[0]
        ids = torch.tensor([[*prompt, token] for token in range(V)])
        two = Choice(policy.law.warp(policy.model(input_ids=ids).logits[:, -1])).probabilities
    pi = one[:, None] * two
    pi[1] = 0.0
    pi[1, 0] = one[1]
    return pi.flatten()


LAWS = [Law(), Law(0.8, top_k=12, top_p=0.9)]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("design", [design.name for design in Design])
def test_each_siblings_completions_follow_the_policy(design, law):
    """Chi-square of whole completions, for each place in the group, cells of expectation below 5 pooled."""
    policy = tiny_policy()
    policy.law = law
    groups, k, pi = 1200, 4, enumerated(policy)
    requests = [request(k, name=f"p{group}", group=group) for group in range(groups)]
    rollouts = completions(policy, requests, sampler(design=Design[design]))
    ids = torch.nn.functional.pad(rollouts.completion_ids, (0, 2 - rollouts.completion_ids.shape[1]))
    cells = (ids[:, 0] * policy.model.config.vocab_size + ids[:, 1]).view(groups, k)
    assert bool((pi[cells] > 0).all())
    big = groups * pi >= 5
    for sibling in range(k):
        seen = torch.bincount(cells[:, sibling], minlength=len(pi)).double()
        wanted = torch.cat([groups * pi[big], (groups * pi[~big].sum()).reshape(1)])
        found = torch.cat([seen[big], seen[~big].sum().reshape(1)])
        statistic = float(((found - wanted) ** 2 / wanted)[wanted > 0].sum())
        assert chi2.sf(statistic, int((wanted > 0).sum()) - 1) > UNLIKELY


def test_one_sample_per_prompt_follows_the_policy():
    policy = tiny_policy()
    pi, n = enumerated(policy), 4000
    rollouts = completions(policy, [request(1, name=f"p{i}", group=i) for i in range(n)], sampler(), max_tokens=1)
    wanted = n * pi.view(23, 23).sum(1)
    seen = torch.bincount(rollouts.completion_ids[:, 0], minlength=23)
    assert chi2.sf(float(((seen - wanted) ** 2 / wanted).sum()), 22) > UNLIKELY


def test_a_lattice_covers_the_policys_answers_on_the_real_engine():
    """A completion x has floor or ceil of k pi(x) copies; the design and the place of each row are kept."""
    policy, k = tiny_policy(), 64
    pi = enumerated(policy)
    rollouts = completions(policy, [request(k)], sampler(design=Design.lattice))
    cells = rollouts.completion_ids[:, 0] * 23 + rollouts.completion_ids[:, 1]
    counts = torch.bincount(cells, minlength=len(pi)).double()
    assert bool((counts >= (k * pi - 1e-4).floor()).all() and (counts <= (k * pi + 1e-4).ceil()).all())
    kept = {name: values.tolist() for name, values in rollouts.design.items()}
    assert kept == {"design": [1] * k, "block": [0] * k, "index": list(range(k)), "k": [k] * k}


@pytest.mark.parametrize("build", [qwen, gpt2])
@pytest.mark.parametrize("design", ["stratified", "token_sobol"])
def test_both_engines_give_the_same_completions(make_policy, requests, build, design):
    policy = make_policy(build(), temperature=0.9, top_k=30)
    native = decode(requests, sampler(design=Design[design]), policy.law, policy, max_tokens=9, max_prompt_length=99, seed=0, step=0, rows_at_once=7)  # fmt: skip
    config = SimpleNamespace(max_completion_length=9, max_prompt_length=99, seed=0)
    run = SimpleNamespace(config=config, step=0)
    twin = Hf(Hf.Config()).generate(
        requests=requests, sampler=sampler(design=Design[design]), law=policy.law, policy=policy, run=run
    )
    assert native.completion_ids.equal(twin.completion_ids) and native.text == twin.text
    assert all(native.design[name].equal(twin.design[name]) for name in native.design)


# Orders, precision, vectorisation


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("V", [3, 70, 300, 5000])
def test_every_order_divides_the_interval_by_the_law(order, V):
    """N evenly spaced numbers: each token's bin holds N p of them, to one at each end."""
    logits = torch.from_numpy(stream(0, "test", V).normal(size=V) * 2).float()
    logits[: V // 3] = -torch.inf
    choice = Choice(logits.expand(400, -1))
    N = 4000
    grid = ((torch.arange(N) + 0.5) / N).double()
    picked = [sampler(order=order).pick(choice, u) for u in grid.split(400)]
    token, low, width = (torch.cat(column) for column in zip(*picked, strict=True))
    p = choice.probabilities[0]
    assert bool(((torch.bincount(token, minlength=V) - N * p).abs() <= 1.02).all())
    assert bool((low <= grid + 1e-9).all() and (grid <= low + width + 1e-9).all())
    torch.testing.assert_close(width, p[token], rtol=0, atol=1e-7)
    ranks = p.argsort(descending=True, stable=True)
    sorted_first = {Order.desc: V, Order.auto: V if V <= 4096 else 0, Order.id: 0, Order.head: min(64, V)}[order]
    met = list(dict.fromkeys(token.tolist()))  # in the order of the bins
    expected = ranks[:sorted_first].tolist() + sorted(ranks[sorted_first:].tolist())
    assert met == [v for v in expected if v in set(met)]


def test_ties_go_to_the_smaller_id():
    choice = Choice(torch.zeros(4, 4))
    u = torch.tensor([0.1, 0.3, 0.6, 0.9], dtype=torch.float64)
    assert sampler(order=Order.desc).pick(choice, u)[0].tolist() == [0, 1, 2, 3]


def law_of(prefix, V=5):
    p = stream(7, "law", *prefix).gamma(0.7, size=V) + 1e-3
    return tuple(p / p.sum())


@pytest.mark.parametrize("design, slack", [("lattice", 0), ("stratified", 1)])
def test_prefix_counts_stay_next_to_k_times_pi_at_every_token(design, slack):
    """Also after numbers were renewed, here every 5 bits: such a prefix holds one row at most."""
    k, laws = 16, {}
    for group in range(12):
        made = started(
            request(k, name=f"p{group}"), eval_design=Design[design], design=Design[design], refresh_bits=5.0
        )
        pi, rows = {(): 1.0}, [()] * k
        for position in range(14):
            p = torch.tensor([laws.setdefault(prefix, law_of(prefix)) for prefix in rows], dtype=torch.float64)
            token = made.next(Choice(p.log().float()), torch.arange(k), position).tolist()
            for prefix in set(rows):
                pi |= {(*prefix, v): pi[prefix] * float(q) for v, q in enumerate(laws[prefix])}
            rows = [(*prefix, v) for prefix, v in zip(rows, token, strict=True)]
            children = [prefix for prefix in pi if len(prefix) == position + 1]
            for prefix in children:
                low, high = floor(k * pi[prefix] - 1e-4) - slack, ceil(k * pi[prefix] + 1e-4) + slack
                assert low <= rows.count(prefix) <= high
        assert int(made.renewed.max()) > 1


@pytest.mark.parametrize("V, p", [(32, [1 / 32] * 32), (4, [0.5, 0.25, 0.125, 0.125])])
def test_long_completions_do_not_run_out_of_digits(V, p):
    """Total variation of the 64th token's law: noise of 3000 rows (about .04) with renewal, far off without it."""
    rows = 3000
    choice = Choice(torch.tensor(p).log().expand(rows, -1))
    found = {}
    for bits in (12.0, 24.0, inf):
        made = started([request(8, name=f"p{i}", group=i) for i in range(rows // 8)], refresh_bits=bits)
        for position in range(64):
            token = made.next(choice, torch.arange(rows), position)
        found[bits] = float((torch.bincount(token, minlength=V) / rows - torch.tensor(p)).abs().sum()) / 2
    assert max(found[12.0], found[24.0]) < 0.06 and found[inf] > 0.4


def test_completions_hardly_depend_on_how_rows_are_batched(make_policy):
    """Rounding differs with the shape of a batch, and each bit used doubles it: at 24 bits before renewal nine rows of
    ten differ after 20 tokens, at 12 one of 250."""
    policy = make_policy()
    asked = [Request(Prompt(f"p{i}", text="5 6 7" + " 8" * (i % 3)), i, tuple(range(8))) for i in range(16)]
    options = {"max_tokens": 20, "max_prompt_length": 99, "seed": 0, "step": 0}
    a, b = (decode(asked, sampler(), policy.law, policy, rows_at_once=n, **options).completion_ids for n in (512, 24))
    assert (a != b).any(1).double().mean() < 0.1


def test_another_rows_logits_never_change_a_rows_token():
    logits = torch.from_numpy(stream(0, "logits").normal(size=(8, 50))).float()
    changed = logits.clone()
    changed[3] = changed[3].flip(0)
    for design in Design:
        a, b = (
            started(request(8), design=design).next(Choice(values), torch.arange(8), 0) for values in (logits, changed)
        )
        assert a[[0, 1, 2, 4, 5, 6, 7]].equal(b[[0, 1, 2, 4, 5, 6, 7]])


def test_rows_that_finished_keep_their_state():
    made = started(request(4))
    before = made.u.clone()
    made.next(Choice(torch.zeros(2, 8)), torch.tensor([1, 3]), 0)
    assert (made.u == before).tolist() == [True, False, True, False] and made.bits.tolist() == [0, 3, 0, 3]


def test_a_sobol_net_balances_each_token_and_ends_where_it_should():
    made = started(request(8), design=Design.token_sobol, sobol_dims=5)
    rows = torch.arange(8)
    balanced = [sorted((made.points(rows, position) * 8).long().tolist()) == list(range(8)) for position in range(16)]
    assert balanced[:5] == [True] * 5 and not all(balanced[5:])  # afterwards 8 numbers in 8 cells: chance .0024 each


# Keys


def numbers(made):
    return torch.stack([made.u, made.key.double(), made.shift.double()], 1)


def test_numbers_depend_on_the_request_and_not_on_its_company():
    requests = [request(8, name=f"p{i}", group=i) for i in range(5)]
    whole = numbers(started(requests)).view(5, 8, 3)
    for rank in range(2):  # two processes
        assert numbers(started(requests[rank::2])).equal(whole[rank::2].flatten(0, 1))
    assert len({tuple(row) for row in whole[:, :, 0].tolist()}) == 5


@pytest.mark.parametrize("design", list(Design))
def test_steps_passes_groups_seeds_and_parts_of_a_group_have_their_own_numbers(design):
    base = request(4)
    parts = [
        started(base, design=design), started(base, design=design, step=2), started(base, design=design, seed=1),
        started(request(4, tag="second"), design=design), started(request(4, group=1), design=design),
        started(request(4, start=4), design=design), started(request(4, name="q"), design=design),
        started(replace(base, policy="other"), design=design),
    ]  # fmt: skip
    for column in range(2):
        assert len({tuple(numbers(part)[:, column].tolist()) for part in parts}) == len(parts)


def test_blocks_are_independent_designs_of_training_groups_only():
    made = started([request(8), request(8, tag="eval")], blocks=2, design=Design.lattice)
    table = {name: values.tolist() for name, values in made.design().items()}
    assert table["block"] == [0] * 4 + [1] * 4 + [0] * 8
    assert table["k"] == [4] * 8 + [8] * 8 and table["index"] == [0, 1, 2, 3] * 2 + list(range(8))
    offsets = (made.u * 4 % 1).tolist()
    assert offsets[:4] == pytest.approx([offsets[0]] * 4) and abs(offsets[0] - offsets[4]) > 1e-3


def test_evaluation_has_its_own_design():
    made = started([request(4), request(4, tag="eval")])
    assert made.design()["design"].tolist() == [Design.stratified.value] * 4 + [Design.lattice.value] * 4


# What is refused, and what is said


@pytest.mark.parametrize("name", ["rloo", "passk", "max_at_k"])
def test_leave_one_out_is_refused_before_a_model_is_loaded(name):
    with pytest.raises(UserError, match=f"qmc does not stack with {name}: .*couples.*algo=coupled"):
        activate(compose_section("sampler=qmc", f"algo={name}"))


def compose_section(*overrides):
    from grpozoo.compose.command import compose

    return compose(list(overrides)).plugins


def notices(*overrides):
    config, active = compose("sampler=qmc", *overrides)
    return [text for text in active.hooks.validate(config=config, active=active) if text]


def test_blocks_divide_the_group():
    assert not notices("plugins.qmc.blocks=4")
    with pytest.raises(UserError, match="blocks=3 does not divide group_size=8"):
        notices("plugins.qmc.blocks=3")


def test_what_weakens_a_design_is_said():
    (text,) = notices("plugins.qmc.design=token_sobol", "group_size=6", "plugins.qmc.refresh_bits=2")
    assert "6 points, not a power of 2" in text and "refresh_bits=2 renews rows before siblings have parted" in text
    assert not notices("plugins.qmc.design=token_sobol", "plugins.qmc.blocks=2")


def test_rows_that_nobody_sampled_join_a_coupled_group_and_end_its_estimates():
    """luffy puts traces of another policy beside a group's rows: they have no place in the design."""
    policy = tiny_policy()
    rows = completions(policy, [request(4)], sampler())
    joined = concatenate([rows, replace(rows, design={}).select([0])])
    assert sampler().sets({name: values.tolist() for name, values in joined.design.items()}, 5, 5) == []
    assert {name: values[:4].tolist() for name, values in joined.design.items()} == {
        name: values.tolist() for name, values in rows.design.items()
    }


def test_groups_that_dynamic_sampling_adds_are_designs_of_their_own():
    """Another group of the same prompt in the same step, as `resample` asks for it: whole, and not the first one again."""
    made = started([request(8), request(8, group=32)])
    u = made.u.view(2, 8)
    assert [sorted((part * 8).long().tolist()) for part in u] == [list(range(8))] * 2 and not u[0].equal(u[1])


@pytest.mark.parametrize("options", [{"blocks": 0}, {"refresh_bits": 0.0}, {"refresh_bits": -inf}, {"sobol_dims": 0}, {"sobol_dims": 30000}])  # fmt: skip
def test_ranges(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Qmc.Config(**options)


def test_a_run_trains_evaluates_and_is_greedy_at_temperature_0(tmp_path):
    """The whole program: pass@k by sub-lattices with the bound beside it, one notice for a k that does not divide."""
    from accelerate import Accelerator

    from grpozoo.compose.command import compose
    from grpozoo.compose.settings import read
    from grpozoo.run.run import Run

    small = [
        "model.warm_start=false", "model.layers=1", "model.width=16", "model.heads=2", "max_completion_length=6",
        "task.level=1", "task.train=64", "steps=1", "prompts_per_step=4", "group_size=4", "eval.prompts=4", "eval.samples=4",
        "eval.ks=[1,2,3,4]", "logger.progress=false", "logger.trackers=[]",
    ]  # fmt: skip
    greedy = []
    for name in ("qmc", "iid"):
        run = Run(read(compose([f"sampler={name}", *small])), Accelerator(cpu=True), tmp_path / name, None)
        said = []
        run.say = said.append
        metrics = run.evaluate()
        asked = [request(1, name=f"p{i}", group=i) for i in range(3)]
        greedy.append(run.generate([replace(r, prompt=Prompt(r.prompt.id, text="1+2=")) for r in asked], 0.0).text)
        run.tracker.close()
        passes = {name for name in metrics if "pass@" in name}
        if name == "qmc":
            assert passes == {f"heldout/pass@{k}" for k in (1, 2, 4)} and "heldout/bound@4" in metrics
            assert len(said) == 1 and "left out" in said[0] and "pass@3, best@3, maj@3" in said[0]
        else:
            assert passes == {f"heldout/pass@{k}" for k in (1, 2, 3, 4)} and not said
    assert greedy[0] == greedy[1]
