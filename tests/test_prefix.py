"""States of frozen first layers, kept for a batch: the same numbers as without, and computed once."""

from dataclasses import replace

import pytest
import torch
from conftest import Numbers, gpt2, qwen
from grpozoo_plugins.iid import Independent

from grpozoo.policy import Policy, Snapshot
from grpozoo.rollout import decode
from grpozoo.sampling import Law

PATHS = [True, False]  # shared_prefix


def start(policy, *blocks):
    policy.model.requires_grad_(False)
    for index in blocks:
        policy.blocks[index].requires_grad_(True)
    policy.freeze()
    return policy


def make(layers=4, double=True, blocks=(2,), model=None, **law):
    model = model or qwen(layers=layers)
    return start(Policy(model.double() if double else model, Numbers(), Law(**law), logits_chunk=5), *blocks)


def sample(policy, requests):
    options = {"max_tokens": 9, "max_prompt_length": 99, "seed": 0, "step": 0}
    return decode(requests, Independent(), policy.law, policy, **options)


def gradients(policy, rollouts, shared):
    """log-probabilities and gradients of the trained parameters."""
    policy.model.zero_grad()
    out = policy.output(rollouts, entropy=True, shared_prefix=shared)
    weights = torch.linspace(-1, 1, out.logprobs.numel()).view_as(out.logprobs) / 50
    ((out.logprobs * weights).sum() + (out.entropy**2).sum() / 50).backward()
    return out.logprobs.detach(), {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "initializer_range": 0.3, "eos_token_id": 1, **more}))


def gemma():
    """Sliding windows in every other layer, embeddings that are scaled, logits with a cap: a head that is not linear."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=2.0, eos_token_id=1, initializer_range=0.3,
        attn_implementation="eager", sliding_window=4,
    )  # fmt: skip
    return Gemma2ForCausalLM(config)


@pytest.mark.parametrize("blocks, first", [((0,), 0), ((1, 3), 1), ((2,), 2), ((3,), 3), ((), 4)])
def test_the_cut_is_below_the_lowest_trained_block(blocks, first):
    assert make(blocks=blocks).start == first


def test_nothing_is_cut_where_the_embedding_trains_and_all_where_only_the_head_does():
    policy = make(model=llama())
    policy.model.requires_grad_(False)
    policy.model.lm_head.requires_grad_(True)
    policy.freeze()
    assert policy.start == 4
    policy = make()  # tied: the head is the embedding
    policy.model.lm_head.requires_grad_(True)
    policy.freeze()
    assert policy.start == 0
    assert start(Policy(gpt2(), Numbers(), Law())).start == 0  # no list `layers`: not known where to cut


@pytest.mark.parametrize("shared", PATHS)
@pytest.mark.parametrize("build", [qwen, llama, gemma], ids=lambda build: build.__name__)
@pytest.mark.parametrize("blocks", [(1, 3), (2,), (3,)])
def test_kept_states_change_neither_loss_nor_gradient(requests, shared, build, blocks):
    """Section 7.2, log-probabilities and entropies in float32."""
    policy = make(blocks=blocks, double=False, model=qwen(layers=4) if build is qwen else build())
    assert policy.linear_head == (build is not gemma)
    rollouts = sample(policy, requests)
    expected = gradients(policy, rollouts, shared)
    policy.remember(rollouts, 60, shared)
    found = gradients(policy, rollouts, shared)
    assert len(policy.prefix.done) > 1 and found[1].keys() == expected[1].keys() and expected[1]
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=5e-6)
    for name in expected[1]:
        torch.testing.assert_close(
            found[1][name], expected[1][name], rtol=0, atol=1e-5 * max(1.0, float(expected[1][name].abs().max()))
        )


@pytest.mark.parametrize("shared", PATHS)
@pytest.mark.parametrize("blocks", [(1, 3), (2,), (3,)])
def test_kept_states_of_float64_agree_to_its_rounding(requests, shared, blocks):
    """The states before the head, without its float32: value and gradient."""
    policy = make(blocks=blocks)
    rollouts = sample(policy, requests)

    def run():
        policy.model.zero_grad()
        states = policy.states(rollouts, shared)
        states.sin().sum().backward()
        return states.detach(), {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}

    expected = run()
    policy.remember(rollouts, 60, shared)
    found = run()
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-14 * float(expected[0].abs().max()))
    assert expected[1].keys() == found[1].keys() and expected[1]
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=2e-14 * float(value.abs().max()) + 1e-14)


@pytest.mark.parametrize("shared", PATHS)
def test_parts_of_a_batch_in_any_order_find_their_states(requests, shared):
    """float32, other micro-batches than those that filled it."""
    policy = make(double=False)
    rollouts = sample(policy, requests)
    rows = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(0)).tolist()
    expected = {row: policy.output(rollouts.select([row]), shared_prefix=shared).logprobs[0].detach() for row in rows}
    policy.remember(rollouts, 40, shared)
    for part in (rows[:3], rows[3:9], rows[9:]):
        found = policy.output(rollouts.select(part), shared_prefix=shared).logprobs
        for row, logprobs in zip(part, found, strict=True):
            torch.testing.assert_close(logprobs, expected[row], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shared", PATHS)
def test_frozen_blocks_run_once_and_only_where_asked(requests, shared):
    policy = make()
    rollouts = sample(policy, requests)
    calls = [0] * 4
    for index, block in enumerate(policy.blocks):
        block.self_attn.register_forward_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    policy.remember(rollouts, 10**6, shared)
    for _ in range(5):
        policy.output(rollouts, shared_prefix=shared)
    forwards = 2 if shared else 1  # prompts, then completions
    assert calls == [forwards, forwards, 5 * forwards, 5 * forwards]
    policy.remember(rollouts.select(list(range(len(rollouts)))), 10**6, shared)  # the same rows: nothing is thrown away
    policy.output(rollouts, shared_prefix=shared)
    assert calls[0] == forwards
    policy.remember(rollouts, 10, shared)
    policy.remember(None)
    policy.output(rollouts, shared_prefix=shared)
    assert calls[0] == 2 * forwards and policy.prefix is None


@pytest.mark.parametrize("shared", PATHS)
def test_bits_do_not_depend_on_who_asks_first(requests, shared):
    """A resumed run asks for other rows first than the one that was killed."""
    answers = []
    for first in ([0], [13, 5]):
        policy = make(double=False)
        rollouts = sample(policy, requests)
        policy.remember(rollouts, 40, shared)
        policy.output(rollouts.select(first), shared_prefix=shared)
        answers.append(policy.output(rollouts, shared_prefix=shared).logprobs)
    assert torch.equal(*answers)


@pytest.mark.parametrize("shared", PATHS)
def test_a_process_computes_the_states_of_its_own_rows(requests, shared):
    policy = make(double=False)
    rollouts = sample(policy, requests)
    everything = list(range(len(rollouts)))
    mine = [row for row in everything if rollouts.prompt_ids[row] == rollouts.prompt_ids[0]]
    expected = policy.output(rollouts, shared_prefix=shared).logprobs
    policy.remember(rollouts, 40, shared, mine)
    policy.output(rollouts.select(mine), shared_prefix=shared)
    assert sorted(row for part in policy.prefix.done for row in policy.prefix.parts[part]) == mine != everything
    found = policy.output(rollouts, shared_prefix=shared).logprobs  # other rows are there when they are asked for
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert sorted(sum(policy.prefix.parts, [])) == everything


def test_rows_that_are_not_of_the_batch_run_from_the_embedding(requests):
    policy = make()
    rollouts = sample(policy, requests)
    expected = policy.output(rollouts).logprobs
    policy.remember(rollouts.select([0, 1]), 10**6)
    assert torch.equal(policy.output(rollouts).logprobs, expected) and not policy.prefix.done
    other = replace(rollouts, completion_ids=(rollouts.completion_ids + 1) % 40)
    policy.remember(rollouts, 10**6)
    changed = policy.output(other).logprobs
    policy.remember(None)
    assert torch.equal(changed, policy.output(other).logprobs)


def test_empty_completions_are_rows_too(requests):
    policy = make()
    rollouts = sample(policy, requests)
    mask = rollouts.completion_mask.clone()
    mask[::2] = False
    rollouts = replace(rollouts, completion_mask=mask)
    for shared in PATHS:
        expected = policy.output(rollouts, shared_prefix=shared).logprobs
        policy.remember(rollouts, 40, shared)
        torch.testing.assert_close(policy.output(rollouts, shared_prefix=shared).logprobs, expected, rtol=0, atol=1e-6)
        policy.remember(None)


def test_the_blocks_are_themselves_again_after_an_error(requests):
    policy = make()
    rollouts = sample(policy, requests)
    policy.remember(rollouts, 10**6)
    broken = policy.blocks[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        policy.output(rollouts)
    broken.remove()
    assert not any("forward" in vars(block) for block in policy.blocks)


def test_checkpointed_activations_give_the_gradient_from_kept_states(requests):
    policy = make()
    rollouts = sample(policy, requests)
    expected = gradients(policy, rollouts, False)[1]
    policy.remember(rollouts, 60, False)
    with policy.training(checkpointing=True):
        found = gradients(policy, rollouts, False)[1]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


def moved(policy):
    with torch.no_grad():
        for value in policy.model.parameters():
            if value.requires_grad:
                value.add_(0.1)


@pytest.mark.parametrize("shared", PATHS)
@pytest.mark.parametrize("kept", [True, False])
def test_a_snapshot_answers_as_a_copy_of_the_whole_model_would(requests, shared, kept):
    """Section 7.3."""
    policy = make()
    rollouts = sample(policy, requests)
    trained = [value for value in policy.model.parameters() if value.requires_grad]
    copy, snapshot = policy.copy(), Snapshot(policy, trained)
    start = policy.output(rollouts, shared_prefix=shared).logprobs
    assert torch.equal(snapshot.output(rollouts, shared_prefix=shared).logprobs, start)  # KL is 0 at the start
    moved(policy)
    if kept:
        policy.remember(rollouts, 10**6, shared)
    found = snapshot.output(rollouts, entropy=True, shared_prefix=shared)
    expected = copy.output(rollouts, entropy=True, shared_prefix=shared)
    torch.testing.assert_close(found.logprobs, expected.logprobs.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.entropy, expected.entropy.detach(), rtol=0, atol=1e-6)
    assert (policy.output(rollouts, shared_prefix=shared).logprobs - start).abs().max() > 1e-2  # the policy is back
    assert sum(value.numel() for value in snapshot.parameters()) == sum(value.numel() for value in trained)


def test_a_snapshot_moves_to_the_policy_and_gives_the_values_back_after_an_error():
    policy = make()
    trained = [value for value in policy.model.parameters() if value.requires_grad]
    snapshot = Snapshot(policy, trained)
    start = {name: value.clone() for name, value in snapshot.model.named_parameters()}
    moved(policy)
    now = [value.detach().clone() for value in trained]
    snapshot.mix(policy, 0.25)
    for name, value in snapshot.named_parameters():
        torch.testing.assert_close(value, start[name] + 0.025, rtol=0, atol=1e-12)
    with pytest.raises(ZeroDivisionError), snapshot.in_place():
        assert not torch.equal(trained[0], now[0])
        1 / 0  # noqa: B018
    assert all(map(torch.equal, trained, now))
    snapshot.mix(policy, 1.0)
    assert all(map(torch.equal, snapshot.parameters(), now))
