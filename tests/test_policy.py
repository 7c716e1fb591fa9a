"""Log-probabilities and entropies: against the full softmax, in value and gradient, for every path."""

from dataclasses import replace

import pytest
import torch
from conftest import Numbers, gpt2, qwen
from grpozoo_plugins.iid import Independent

from grpozoo.policy.head import head_logprobs, logits_logprobs
from grpozoo.policy.policy import Policy
from grpozoo.rollout import decode
from grpozoo.sampling import Law

LAWS = [{}, {"temperature": 0.6}, {"temperature": 1.3, "top_k": 9, "top_p": 0.8}, {"min_p": 0.05}]


def sample(policy, requests, max_tokens=9, **more):
    options = {"max_tokens": max_tokens, "max_prompt_length": 99, "seed": 0, "step": 0, **more}
    return decode(requests, Independent(), policy.law, policy, **options)


def brute_force(policy, rollouts, row):
    """Log-probability and entropy of each token of a row: one forward per token, whole softmax, no cache, no padding."""
    ids = list(rollouts.prompt_ids[row])
    found = []
    for token in rollouts.completion_ids[row, : int(rollouts.lengths[row])].tolist():
        logits = policy.model(input_ids=torch.tensor([ids])).logits[:, -1]
        logp = policy.law.warp(logits, torch.tensor([token])).log_softmax(-1)[0]
        p = logp.exp()
        found.append((logp[token], -(p[p > 0] * logp[p > 0]).sum()))
        ids.append(token)
    return found


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("build", [qwen, gpt2])
def test_log_probabilities_and_entropies_equal_brute_force(make_policy, requests, law, shared, build):
    policy = make_policy(build(), **law)
    rollouts = sample(policy, requests)
    out = policy.output(rollouts, entropy=True, shared_prefix=shared)
    for row in range(len(rollouts)):
        for t, (logp, entropy) in enumerate(brute_force(policy, rollouts, row)):
            assert out.logprobs[row, t].item() == pytest.approx(logp.item(), abs=2e-5)
            assert out.entropy[row, t].item() == pytest.approx(entropy.item(), abs=2e-5)
    assert not out.logprobs[~rollouts.completion_mask].any()


@pytest.mark.parametrize("law", LAWS)
def test_the_sampler_recorded_the_trainers_log_probabilities(make_policy, requests, law):
    """Peers C6, C7, C9: the importance ratio of fresh samples is 1 at any temperature and truncation."""
    policy = make_policy(**law)
    rollouts = sample(policy, requests)
    out = policy.output(rollouts)
    torch.testing.assert_close(out.logprobs, rollouts.logprobs, rtol=0, atol=1e-5)


def gradients(policy, rollouts, **options):
    policy.model.requires_grad_(True)
    policy.model.zero_grad()
    out = policy.output(rollouts, entropy=True, **options)
    weights = torch.linspace(-1, 1, out.logprobs.numel()).view_as(out.logprobs)
    ((out.logprobs * weights).sum() + (out.entropy**2).sum()).backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters()}


@pytest.mark.parametrize("law", LAWS)
def test_shared_prefix_has_the_gradient_of_whole_sequences(requests, law):
    policy = Policy(qwen().double(), Numbers(), Law(**law), logits_chunk=5)
    rollouts = sample(policy, requests)
    plain, shared = (gradients(policy, rollouts, shared_prefix=shared) for shared in (False, True))
    for name in plain:
        torch.testing.assert_close(shared[name], plain[name], rtol=0, atol=1e-4)  # entropies are float32


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_head_equals_the_plain_one_in_value_and_gradient(law, chunk):
    torch.manual_seed(0)
    base = [torch.randn(23, 8), torch.randn(50, 8), torch.randn(50)]
    targets, law = torch.randint(50, (23,)), Law(**law)
    scale = torch.randn(2, 23)
    results = []
    for chunked in (True, False):
        states, weight, bias = (tensor.clone().requires_grad_() for tensor in base)
        if chunked:
            logp, entropy = head_logprobs(states, weight, bias, targets, law, True, chunk)
        else:
            logp, entropy = logits_logprobs(states @ weight.T + bias, targets, law, True)
        (logp * scale[0] + entropy * scale[1]).sum().backward()
        results.append([logp, entropy, states.grad, weight.grad, bias.grad])
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)


def test_logits_of_a_chunk_only_exist_at_the_same_time(monkeypatch):
    """Peers K1: 4000 tokens x 50 ids never stand in memory together."""
    largest = []
    real = torch.nn.functional.linear

    def spy(*arguments):
        result = real(*arguments)
        largest.append(result.numel())
        return result

    monkeypatch.setattr(torch.nn.functional, "linear", spy)
    states = torch.randn(4000, 8, requires_grad=True)
    logp, _ = head_logprobs(states, torch.randn(50, 8), None, torch.zeros(4000, dtype=torch.int64), Law(), False, 128)
    logp.sum().backward()
    assert max(largest) <= 128 * 50 and len(largest) == 2 * 32


def test_a_head_that_is_not_linear_takes_the_models_own_logits(requests):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=2.0, eos_token_id=1, initializer_range=0.3,
        attn_implementation="eager", sliding_window=4,
    )  # fmt: skip
    policy = Policy(Gemma2ForCausalLM(config), Numbers(), Law())
    assert not policy.linear_head
    rollouts = sample(policy, requests)
    out = policy.output(rollouts, entropy=True)
    for row in range(len(rollouts)):
        for t, (logp, _) in enumerate(brute_force(policy, rollouts, row)):
            assert out.logprobs[row, t].item() == pytest.approx(logp.item(), abs=2e-5)
    torch.testing.assert_close(out.logprobs, rollouts.logprobs, rtol=0, atol=1e-5)


def test_an_empty_completion_has_no_tokens_and_no_error(make_policy, requests):
    policy = make_policy()
    rollouts = sample(policy, requests)
    nothing = replace(rollouts, completion_mask=torch.zeros_like(rollouts.completion_mask))
    assert not policy.output(nothing, entropy=True).logprobs.any()


def test_checkpointing_changes_no_gradient_and_the_mode_is_restored(make_policy, requests):
    policy = make_policy()
    rollouts = sample(policy, requests)
    plain = gradients(policy, rollouts, shared_prefix=False)
    with policy.training(checkpointing=True):
        assert policy.model.training
        again = gradients(policy, rollouts, shared_prefix=False)
    assert not policy.model.training
    for name in plain:
        assert again[name].equal(plain[name])
    with pytest.raises(RuntimeError), policy.training(checkpointing=True):
        raise RuntimeError
    assert not policy.model.training
