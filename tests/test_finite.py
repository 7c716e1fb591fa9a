"""Logits that are no numbers end in one sentence: where they were seen, and whether weights or temperature did it."""

import pytest
import torch
from conftest import qwen
from test_policy import sample
from test_rollout import plain_twin

from grpozoo import UserError
from grpozoo.config import Config, Eval, Model
from grpozoo.sampling import Choice, Greedy, Law

WEIGHT = "model.layers.1.mlp.up_proj.weight"
NO_NUMBERS = "logits are NaN or infinite at token"


def poison(model, value):
    model.get_parameter(WEIGHT).data[3, 3] = value
    return model


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("law", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_broken_weights_are_named_by_both_engines(make_policy, requests, value, law):
    policy = make_policy(poison(qwen(), value), **law)
    wanted = rf"{NO_NUMBERS} 1 of a completion of prompt 'p\d'\nits weights are: {WEIGHT}; .*lower lr"
    with pytest.raises(UserError, match=wanted):
        sample(policy, requests)
    with pytest.raises(UserError, match=wanted):
        plain_twin(policy, requests, Greedy(), policy.law)


@pytest.mark.parametrize("shared", [True, False])
def test_log_probabilities_of_broken_weights_are_refused_with_and_without_gradient(make_policy, requests, shared):
    policy = make_policy()
    rollouts = sample(policy, requests)
    poison(policy.model, torch.nan)
    with pytest.raises(UserError, match=rf"{NO_NUMBERS} 1 of a completion of prompt 'p0'\nits weights are: {WEIGHT}"):
        policy.output(rollouts, shared_prefix=shared)
    with torch.no_grad(), pytest.raises(UserError, match=NO_NUMBERS):
        policy.output(rollouts, shared_prefix=shared)


def test_finite_weights_whose_logits_overflow_say_so(make_policy, requests):
    model = qwen()
    model.model.norm.weight.data.fill_(3e38)  # finite in float32, and the logits are not
    with pytest.raises(UserError, match=f"{NO_NUMBERS} 1 .*\n.*weights are finite: they overflow float32"):
        sample(make_policy(model), requests)


def test_the_row_that_is_broken_is_the_one_that_is_named():
    rows = torch.zeros(4, 3)
    rows[1, 2], rows[2] = torch.nan, -torch.inf
    assert Choice(rows).broken.tolist() == [False, True, True, False]
    rows = torch.full((1, 3), -torch.inf)
    rows[0, 1] = 2.0
    assert not Choice(rows).broken.any()  # one token is a law


@pytest.mark.parametrize("temperature", [1e-40, 9e-6, -1.0, float("nan"), float("inf")])
def test_temperatures_that_make_no_law_are_refused_before_a_model_is_loaded(temperature):
    for build in (Config(temperature=temperature).check, lambda: Law(temperature)):
        with pytest.raises(UserError, match="temperature is"):
            build()
    with pytest.raises(UserError, match="eval.temperature is"):
        Eval(temperature=temperature).check()


def test_the_lowest_temperature_is_finite_in_value_and_gradient(make_policy, requests):
    policy = make_policy(temperature=1e-5)
    out = policy.output(sample(policy, requests))
    out.logprobs.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in policy.model.parameters())


def test_float16_is_refused_with_the_reason():
    with pytest.raises(UserError, match="float16 cannot be trained.*bfloat16 or float32"):
        Model(dtype="float16").check()
    Model(dtype="bfloat16").check()
