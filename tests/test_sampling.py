"""The sampling law: what is kept, what is drawn, and the log-probability that is recorded."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpozoo.rng import stream
from grpozoo.sampling import Choice, Law, TokenSampler, counted_bits, counted_uniform

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.0]])


def test_top_k_keeps_the_k_likeliest_and_ties_go_to_the_smaller_id():
    assert Law(top_k=2).kept(LOGITS).tolist() == [[True, True, False, False, False]]


def test_top_p_keeps_the_token_that_crosses_the_mass():
    p = LOGITS.softmax(-1)[0]  # .536 .197 .073 .027 .197
    kept = Law(top_p=0.6).kept(LOGITS)[0]
    assert kept.tolist() == [True, True, False, False, False]
    assert p[0] < 0.6 < p[0] + p[1]


def test_min_p_is_relative_to_the_likeliest_token():
    assert Law(min_p=0.3).kept(LOGITS)[0].tolist() == [True, True, False, False, True]  # e^-1 = .368, e^-2 = .135


def test_truncated_law_is_renormalised():
    logprobs = Choice(Law(top_k=2).warp(LOGITS)).logprobs(torch.tensor([1]))
    assert logprobs.item() == pytest.approx(math.log(math.e / (math.e + math.e**2)), abs=1e-6)


def test_a_kept_token_stays_whatever_the_truncation_says():
    warped = Law(top_k=1).warp(LOGITS, keep=torch.tensor([3]))
    assert warped.isfinite().tolist() == [[True, False, False, True, False]]


@given(st.integers(1, 700), st.integers(0, 10**6), st.floats(0.2, 3), st.integers(0, 20), st.floats(0.05, 1))
@settings(max_examples=60, deadline=None)
def test_two_level_search_finds_the_token_of_a_full_scan(vocabulary, seed, temperature, top_k, top_p):
    rng = stream(seed, "test")
    logits = torch.from_numpy(rng.normal(size=(16, vocabulary)) * 4).float()
    choice = Choice(Law(temperature, top_k=top_k, top_p=top_p).warp(logits))
    u = torch.from_numpy(rng.random(16))
    token, low, width = choice.pick(u)
    assert token.equal(choice.pick_plain(u))
    assert bool((choice.probabilities[torch.arange(16), token] > 0).all())
    assert bool((low <= u + 1e-9).all() and (u <= low + width + 1e-9).all())
    torch.testing.assert_close(width, choice.probabilities[torch.arange(16), token], rtol=0, atol=1e-7)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_interval_give_tokens_that_may_be_drawn(u):
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [5, 300]] = 0.0
    token, _, _ = Choice(logits).pick(torch.tensor([u], dtype=torch.float64))
    assert token.item() == (5 if u == 0 else 300)


def test_small_temperatures_stay_finite():
    assert bool(Choice(Law(temperature=1e-4).warp(LOGITS)).logprobs(torch.tensor([0])).isfinite().all())


def splitmix(seed, n):
    """The reference in unbounded integers: Steele, Lea and Flood, 2014."""
    z = (seed + (n + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_counted_bits_are_those_of_splitmix():
    assert splitmix(1234567, 0) == 6457827717110365317  # the first number of the published test
    keys, ns = [0, 1234567, 2**62 + 5, 2**63 - 1], [0, 1, 77, 2**31]
    found = counted_bits(torch.tensor(keys)[:, None], torch.tensor(ns))
    assert found.tolist() == [[splitmix(key, n) >> 1 for n in ns] for key in keys]
    u = counted_uniform(torch.tensor(keys)[:, None], torch.tensor(ns))
    assert u.tolist() == [[(splitmix(key, n) >> 11) / 2**53 for n in ns] for key in keys]


def test_a_sampler_knows_no_smaller_set_than_the_whole_unless_it_says_so():
    assert TokenSampler().sets({}, 3, 3) == [[[0], [1], [2]]] and TokenSampler().sets({}, 3, 2) == []
