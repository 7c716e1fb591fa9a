"""The decode loop against its plain twin and against itself in other arrangements."""

from types import SimpleNamespace

import pytest
import torch
from conftest import STOP, Numbers, gpt2, qwen
from grpozoo_plugins.hf import Hf
from grpozoo_plugins.iid import Independent
from test_policy import sample

from grpozoo.errors import UserError
from grpozoo.policy.policy import Policy
from grpozoo.rollout import GROW
from grpozoo.sampling import Greedy, Law
from grpozoo.types import Prompt, Request


def plain_twin(policy, requests, sampler, law, max_tokens=9):
    config = SimpleNamespace(max_completion_length=max_tokens, max_prompt_length=99, seed=0)
    run = SimpleNamespace(config=config, step=0)
    return Hf(Hf.Config()).generate(requests=requests, sampler=sampler, law=law, policy=policy, run=run)


def same(a, b):
    assert a.text == b.text and a.finish_reason == b.finish_reason and a.prompt_ids == b.prompt_ids
    assert a.completion_ids.equal(b.completion_ids) and a.completion_mask.equal(b.completion_mask)
    torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("build", [qwen, gpt2])
@pytest.mark.parametrize("law", [{}, {"temperature": 0.7, "top_k": 12, "top_p": 0.9}])
def test_native_and_generate_sample_the_same_completions(make_policy, requests, build, law):
    policy = make_policy(build(), **law)
    same(sample(policy, requests), plain_twin(policy, requests, Independent(), policy.law))


@pytest.mark.parametrize("build", [qwen, gpt2])
def test_native_and_generate_give_the_same_greedy_text(make_policy, requests, build):
    policy = make_policy(build())
    from grpozoo.rollout import decode

    native = decode(requests, Greedy(), Law(0.0), policy, max_tokens=9, max_prompt_length=99, seed=0, step=0)
    same(native, plain_twin(policy, requests, Greedy(), Law(0.0)))
    assert len({tuple(native.completion_ids[row].tolist()) for row in range(2)}) == 1  # siblings agree


def test_a_models_own_penalties_do_not_change_the_law_of_generate(make_policy, requests):
    model = qwen()
    model.generation_config.repetition_penalty, model.generation_config.no_repeat_ngram_size = 1.5, 2
    policy = make_policy(model)
    same(sample(policy, requests), plain_twin(policy, requests, Independent(), policy.law))
    assert model.generation_config.repetition_penalty == 1.5


def test_a_cache_that_cannot_be_expanded_is_an_error_with_a_way_out(make_policy):
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(UserError, match="engine=hf update.shared_prefix=false"):
        sample(make_policy(model), [Request(Prompt(id="p", text="5 6"), 0, (0, 1))])


def test_completions_do_not_depend_on_what_is_decoded_beside_them(make_policy, requests):
    policy = make_policy()
    whole = sample(policy, requests)
    same(whole, sample(policy, requests, rows_at_once=3))
    backwards = sample(policy, requests[::-1])
    assert dict(
        zip(zip(whole.group_id.tolist(), whole.sample_id.tolist(), strict=True), whole.text, strict=True)
    ) == dict(
        zip(zip(backwards.group_id.tolist(), backwards.sample_id.tolist(), strict=True), backwards.text, strict=True)
    )


def test_the_cache_grows_beyond_its_first_buffer(make_policy, requests):
    policy = make_policy(qwen(vocabulary=200))
    rollouts = sample(policy, requests, max_tokens=2 * GROW + 10)
    assert int(rollouts.lengths.max()) > GROW + 5
    torch.testing.assert_close(policy.output(rollouts).logprobs, rollouts.logprobs, rtol=0, atol=1e-4)


def test_siblings_steps_and_passes_differ(make_policy):
    policy = make_policy(qwen(vocabulary=200))
    prompt = Prompt(id="p", text="5 6 7")

    def draw(step=0, **more):
        return sample(policy, [Request(prompt, 0, tuple(range(8)), **more)], step=step).text

    texts = draw()
    assert len(set(texts)) == 8 and draw() == texts
    assert not set(texts) & set(draw(step=1)) and not set(texts) & set(draw(tag="eval"))


def test_masks_hold_what_was_sampled_and_the_stop_token(make_policy, requests):
    """Peers D1, D2: pad = eos, yet the sampled eos is a token of the completion; what follows it is not."""
    rollouts = sample(make_policy(), requests, max_tokens=30)
    assert "stop" in rollouts.finish_reason
    for row, reason in enumerate(rollouts.finish_reason):
        length = int(rollouts.lengths[row])
        tokens = rollouts.completion_ids[row, :length].tolist()
        assert (tokens[-1] == STOP) == (reason == "stop") and STOP not in tokens[:-1]
        assert rollouts.completion_mask[row].tolist() == [t < length for t in range(rollouts.completion_ids.shape[1])]


def test_any_stop_id_ends_a_row(requests):
    """Peers D3."""
    model = qwen()
    model.generation_config.eos_token_id = [1, 2, 4]
    rollouts = sample(Policy(model, Numbers(), Law()), requests, max_tokens=40)
    ends = {
        int(rollouts.completion_ids[row, n - 1])
        for row, n in enumerate(rollouts.lengths.tolist())
        if rollouts.finish_reason[row] == "stop"
    }
    assert ends <= {1, 2, 4} and len(ends) > 1


@pytest.mark.parametrize("build", [qwen, gpt2])
def test_left_padding_changes_nothing(make_policy, build):
    """Peers D4: a short prompt beside a long one gets the positions and log-probabilities that it has alone."""
    policy = make_policy(build())
    short = Request(Prompt(id="short", text="5 6"), 0, (0, 1, 2))
    long = Request(Prompt(id="long", text=" ".join(str(n) for n in range(3, 25))), 1, (0,))
    alone, beside = sample(policy, [short]), sample(policy, [short, long])
    n = alone.completion_ids.shape[1]
    assert alone.text == beside.text[:3]
    torch.testing.assert_close(beside.logprobs[:3, :n], alone.logprobs, rtol=0, atol=1e-5)


def test_a_prompt_that_is_too_long_is_an_error(make_policy, requests):
    with pytest.raises(UserError, match="p2.*7 tokens.*max_prompt_length is 5"):
        sample(make_policy(), requests, max_prompt_length=5)


def test_sampled_frequencies_follow_the_law(make_policy):
    """4000 first tokens against the model's law: chi-square with 38 degrees of freedom stays below its 99.99 % point."""
    policy = make_policy()
    requests = [Request(Prompt(id=f"p{i}", text="5 6 7"), i, tuple(range(40))) for i in range(100)]
    tokens = sample(policy, requests, max_tokens=1).completion_ids[:, 0]
    p = policy.model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].detach().double().softmax(-1)
    seen = torch.bincount(tokens, minlength=40).double()
    assert float(((seen - 4000 * p) ** 2 / (4000 * p)).sum()) < 84
