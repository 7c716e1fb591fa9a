"""Low-rank adapters: the update is B A and nothing else, the reference is the adapter of the start, the export is plain.

Most of it needs the package peft (the extra `lora`)."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from conftest import Numbers, qwen
from grpozoo_plugins import lora
from safetensors.torch import load_file
from test_runs import SMALL, difference, one_thread, train  # noqa: F401

from grpozoo import UserError
from grpozoo.compose.plugins import create
from grpozoo.policy import Policy, Snapshot
from grpozoo.rollout import decode
from grpozoo.sampling import Law
from grpozoo.testing import check_plugin
from grpozoo.testing.golden import compose

peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft: pip install grpozoo[lora]")
TWO = [*SMALL, "model.layers=2"]
RANK = ["params=lora", "plugins.lora.rank=2", "plugins.lora.alpha=4"]


def test_without_peft_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    config, active = compose("params=lora")
    with pytest.raises(UserError, match=r'pip install "grpozoo\[lora\]"'):
        active.hooks.validate(config=config, active=active)


@pytest.mark.parametrize("options, message", [
    ({"rank": 0}, "rank is at least 1"), ({"alpha": 0.0}, "alpha above 0"), ({"targets": []}, "nothing would train"),
    ({"layers": []}, "nothing would train"),
])  # fmt: skip
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        create("lora", options)


def adapted(**options):
    """A policy of three blocks with a fresh adapter, and the groups of the optimizer."""
    policy = Policy(qwen(layers=3).double(), Numbers(), Law(), logits_chunk=5)
    groups = create("lora", {"rank": 2, "alpha": 4.0, **options}).select_parameters(policy=policy)
    policy.freeze()
    return policy, groups


def shifted(groups):
    """The adapter as after some training: B is not 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in groups[0]["params"]:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))


def sample(policy, requests):
    return decode(requests, lora_sampler(), policy.law, policy, max_tokens=9, max_prompt_length=99, seed=0, step=0)


def lora_sampler():
    from grpozoo_plugins.iid import Independent

    return Independent()


@peft
def test_only_the_adapter_trains_and_at_the_start_it_changes_nothing(requests):
    plain = Policy(qwen(layers=3).double(), Numbers(), Law(), logits_chunk=5)
    rollouts = sample(plain, requests)
    policy, groups = adapted()
    assert torch.equal(policy.output(rollouts).logprobs, plain.output(rollouts).logprobs)
    on = {name for name, value in policy.model.named_parameters() if value.requires_grad}
    assert all("lora_" in name for name in on) and len(on) == len(groups[0]["params"]) == 2 * 7 * 3
    assert not policy.model.training and policy.start == 0


@peft
def test_the_update_is_alpha_over_rank_times_b_a():
    policy, groups = adapted(targets=["q_proj"], layers=[1])
    before = qwen(layers=3).double().model.layers[1].self_attn.q_proj.weight
    shifted(groups)
    A, B = (value for _, value in sorted((n, v) for n, v in policy.model.named_parameters() if v.requires_grad))
    after = policy.plain().model.layers[1].self_attn.q_proj.weight
    torch.testing.assert_close(after, before + 4 / 2 * B @ A, rtol=0, atol=1e-12)
    assert policy.start == 1  # blocks below the adapter are frozen


@peft
def test_the_export_is_a_plain_model_that_answers_the_same(requests, tmp_path):
    policy, groups = adapted()
    shifted(groups)
    rollouts = sample(policy, requests)
    model = policy.plain()
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in qwen(layers=3).named_parameters()}
    exported = Policy(model, Numbers(), Law(), logits_chunk=5)
    torch.testing.assert_close(exported.output(rollouts).logprobs, policy.output(rollouts).logprobs, rtol=0, atol=1e-6)
    model.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {n for n, _ in qwen(layers=3).named_parameters()} - {
        "lm_head.weight"
    }
    assert any("lora_" in name for name, _ in policy.model.named_parameters())  # the policy goes on with its adapter


@peft
@pytest.mark.parametrize("layers", [None, [2]])
def test_the_reference_is_the_adapter_of_the_start_even_if_it_is_not_zero(requests, layers):
    """Peers C10: KL exactly 0 before the first update."""
    policy, groups = adapted(layers=layers)
    shifted(groups)
    reference = Snapshot(policy, groups[0]["params"])
    rollouts = sample(policy, requests)
    policy.remember(rollouts, 10**6)
    start = policy.output(rollouts).logprobs.detach()
    assert torch.equal(reference.output(rollouts).logprobs, start)
    shifted(groups)
    assert torch.equal(reference.output(rollouts).logprobs, start)
    assert not torch.equal(policy.output(rollouts).logprobs, start)
    reference.mix(policy, 1.0)
    assert torch.equal(reference.output(rollouts).logprobs, policy.output(rollouts).logprobs)


@peft
def test_kept_states_below_the_lowest_adapter_change_nothing(requests):
    policy, groups = adapted(layers=[2])
    shifted(groups)
    rollouts = sample(policy, requests)
    expected = policy.output(replace(rollouts)).logprobs
    policy.remember(rollouts, 40)
    assert policy.start == 2
    torch.testing.assert_close(policy.output(rollouts).logprobs, expected, rtol=0, atol=1e-6)


@peft
def test_what_the_model_lacks_is_refused():
    with pytest.raises(UserError, match="plugins.lora.targets"):
        adapted(targets=["nowhere"])
    for name in ("embed_tokens", "lm_head"):
        with pytest.raises(UserError, match="embeddings and head take no adapter"):
            adapted(targets=["q_proj", name])
    with pytest.raises(UserError, match="there is no layer 3; the model has 0 to 2"):
        adapted(layers=[3])


@peft
def test_a_run_trains_resumes_to_the_bit_and_ends_with_a_plain_model(tmp_path):
    options = [*RANK, "plugins.grpo.kl_coef=0.1", "update.mini_batches=2"]
    train(tmp_path / "straight", "steps=4", *options, small=TWO)
    train(tmp_path / "run", "steps=2", *options, small=TWO)
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert all("lora_" in name for name in load_file(folder / "trained.safetensors"))
    train(tmp_path / "run", "steps=4", *options, f"resume={tmp_path / 'run'}", small=TWO)
    assert difference(tmp_path / "run", tmp_path / "straight") == 0
    train(tmp_path / "still", "steps=1", "lr=0", small=TWO)
    assert difference(tmp_path / "run", tmp_path / "still") > 1e-4  # and the names are those of the plain model


@peft
def test_it_conforms():
    check_plugin("lora", "params=lora", "plugins.lora.rank=2", skip={"parameters"})  # it adds some and renames others
