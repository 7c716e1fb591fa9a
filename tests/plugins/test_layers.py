"""Training of some layers: which ones, that nothing else moves, what it costs, and that a killed run goes on."""

import hashlib
import itertools
import json
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import torch
from grpozoo_plugins.layers import contributions
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_runs import SMALL, difference, environment, metrics, one_thread, train, wait_for_work  # noqa: F401
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from grpozoo import UserError
from grpozoo.cli import layer_scan
from grpozoo.compose.plugins import create
from grpozoo.policy.frozen import ending
from grpozoo.policy.policy import Policy
from grpozoo.run.passes import Passes
from grpozoo.run.run import Run
from grpozoo.sampling import Law
from grpozoo.testing import check_plugin
from grpozoo.testing.context import tiny_policy
from grpozoo.testing.golden import compose as composed

# Table 13 of the paper: C of layers 0 to 27 of Qwen3-1.7B-Base.
PUBLISHED = [.89, .87, 1.03, .75, .77, .78, .87, .80, .72, 1.04, 1.14, .92, 1.12, 1.01, .92, .95, .85, .83, .66, .52, .32,
             .40, .47, .32, .28, .35, .36, .54]  # fmt: skip
L, D, V, B, T = 6, 64, 64, 4, 32  # section 6.2: blocks, width, vocabulary, rows, tokens
F_LIN, F_ATT, F_HEAD = 16777216, 1048576, 1048576


@pytest.fixture
def profile(tmp_path):
    def write(C):
        file = tmp_path / "profile.json"
        file.write_text(json.dumps({"C": {str(layer): value for layer, value in enumerate(C)}}))
        return str(file)

    return write


def layers(**options):
    return create("layers", options)


@pytest.mark.parametrize("count, k, expected", [
    (28, 5, range(11, 16)), (36, 5, range(15, 20)), (36, 10, range(13, 23)), (6, 1, [2]), (6, 2, [2, 3]), (12, 5, range(3, 8)),
    (4, 1, [1]), (4, 4, range(4)),
])  # fmt: skip
def test_the_middle_layers(count, k, expected):
    """Sheet 3.4."""
    assert layers(middle=k).choose(count) == list(expected)
    assert layers().choose(count) == layers(middle=1).choose(count)


def test_the_best_and_the_worst_of_the_published_profile(profile):
    """Sheet 6.1. The rank order matters for ties alone: 11 and 14 have .92 both, 20 and 23 have .32."""
    file = profile(PUBLISHED)
    assert layers(top=5, profile=file).choose(28) == sorted([10, 12, 9, 2, 13])
    assert layers(top=7, profile=file).choose(28) == sorted([10, 12, 9, 2, 13, 15, 11])
    assert layers(top=10, profile=file).choose(28) == sorted([10, 12, 9, 2, 13, 15, 11, 14, 0, 1])
    assert layers(top=5, worst=True, profile=file).choose(28) == sorted([24, 20, 23, 25, 26])
    assert layers(top=2, worst=True, profile=file).choose(28) == [20, 24]
    assert layers(boost=5, profile=file).choose(28) == layers(top=5, profile=file).choose(28)
    assert sum(PUBLISHED[layer] for layer in layers(middle=5).choose(28)) / 5 == pytest.approx(0.984, abs=1e-9)


def test_layers_without_a_contribution_are_never_chosen(profile):
    file = profile([math.nan, 0.5, None, 0.2])
    assert layers(top=2, profile=file).choose(4) == [1, 3]
    with pytest.raises(UserError, match="for 2 of the 4 layers, 3 are wanted"):
        layers(top=3, profile=file).choose(4)


@pytest.mark.parametrize("options, expected", [
    ({"layer": 4}, [4]), ({"layer": -1}, [5]), ({"which": [3, -6, 1]}, [0, 1, 3]), ({"random": 2}, None),
])  # fmt: skip
def test_indices_count_from_both_ends(options, expected):
    chosen = layers(**options).choose(6)
    assert chosen == sorted(set(chosen)) and (chosen == expected or expected is None and len(chosen) == 2)
    assert chosen == layers(**options).choose(6)


def test_random_layers_depend_on_the_seed():
    assert len({tuple(layers(random=3, seed=seed).choose(12)) for seed in range(9)}) > 5


def test_more_layers_than_there_are_is_all_of_them_and_said():
    plugin = layers(middle=9)
    assert plugin.choose(4) == [0, 1, 2, 3] and "9 layers are asked for and the model has 4" in plugin.notice
    assert layers(middle=4).notice == ""


@pytest.mark.parametrize("options, message", [
    ({"which": []}, "names no layer"), ({"middle": 0}, "middle is at least 1"), ({"layer": 1, "top": 2}, "layer and top are different rules"),
    ({"top": 2}, "need profile=FILE"), ({"boost": 2}, "need profile=FILE"), ({"scale": [1.0, 0.0]}, "are above 0"),
    ({"boost": 2, "profile": "x", "boost_factor": -1.0}, "are above 0"), ({"middle": 2, "worst": True}, "worst is for top and boost alone"),
    ({"middle": 2, "profile": "x"}, "profile is for top and boost"), ({"layer": 2, "seed": 1}, "seed is for random"),
    ({"top": 2, "profile": "x", "boost_factor": 3.0}, "boost_factor is for boost"),
])  # fmt: skip
def test_contradictions_are_refused_before_a_model_is_loaded(options, message):
    with pytest.raises(UserError, match=message):
        layers(**options)


@pytest.mark.parametrize("options, message", [
    ({"layer": 2}, "there is no layer 2; the model has 0 to 1, or -1 to -2"), ({"which": [0, -3]}, "there is no layer -3"),
    ({"which": [0, -2]}, "names a layer twice"), ({"layer": 0, "scale": [1.0, 2.0]}, r"2 numbers for the 1 layers \[0\]"),
])  # fmt: skip
def test_layers_that_the_model_lacks_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        layers(**options).select_parameters(policy=tiny_policy())


def test_a_profile_that_does_not_read_is_refused(tmp_path, profile):
    for text in ("{", "[1]", '{"C": [1]}', '{"C": {"a": 1}}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UserError, match="does not read"):
            contributions(tmp_path / "bad.json")
    config, active = composed("params=top", f"plugins.layers.profile={profile([0.1, 0.2])}")
    active.hooks.validate(config=config, active=active)
    config, active = composed("params=top", "plugins.layers.profile=nowhere.json")
    with pytest.raises(UserError, match="nowhere.json does not read"):
        active.hooks.validate(config=config, active=active)


def test_a_model_without_a_list_of_layers_is_refused():
    policy = tiny_policy()
    policy.blocks = []
    with pytest.raises(UserError, match="params=full"):
        layers().select_parameters(policy=policy)


def test_learning_rates_per_layer(profile):
    policy = tiny_policy()
    groups = layers(which=[1, 0], scale=[0.5, 3.0]).select_parameters(policy=policy)
    assert [group["lr_scale"] for group in groups] == [0.5, 3.0]  # by index
    for group, block in zip(groups, policy.blocks, strict=True):
        assert list(map(id, group["params"])) == list(map(id, block.parameters()))
    groups = layers(boost=1, profile=profile([0.2, 0.9])).select_parameters(policy=policy)
    assert groups[0]["lr_scale"] == 2.0 and "lr_scale" not in groups[1]
    assert list(map(id, groups[0]["params"])) == list(map(id, policy.blocks[1].parameters()))
    everything = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(everything) == sorted(map(id, policy.model.parameters()))  # the tied embedding once


def test_all_layers_are_everything_but_embeddings_last_norm_and_head():
    """Section 7.6."""
    policy = model()
    names = {id(value): name for name, value in policy.model.named_parameters()}
    groups = layers(which=list(range(L))).select_parameters(policy=policy)
    left = set(names.values()) - {names[id(parameter)] for group in groups for parameter in group["params"]}
    assert left == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


# ------------------------------------------------------------------------------------------------- section 6.2 and 6.3


def model(*trained, double=False):
    """The small model of the sheet; `trained`: its layers that train, none: all parameters."""
    from conftest import Numbers

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=256, num_hidden_layers=L, num_attention_heads=4,
        attn_implementation="eager", tie_word_embeddings=False, initializer_range=0.1, pad_token_id=None,
    )  # fmt: skip
    policy = Policy(LlamaForCausalLM(config), Numbers(), Law())
    if double:
        policy.model.double()
    policy.model.requires_grad_(not trained)
    for layer in trained:
        policy.blocks[layer].requires_grad_(True)
    policy.freeze()
    return policy


IDS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))


def cost(policy, states=None):
    """(forward, backward) FLOPs of matrix products, from the embedding or from the states of the frozen layers."""

    def forward():
        with policy._from(states):
            return policy.model(input_ids=IDS, use_cache=False).logits

    with FlopCounterMode(display=False) as count:
        logits = forward()
    ahead = count.get_total_flops()
    with FlopCounterMode(display=False) as count:
        logits.sum().backward()
    return ahead, count.get_total_flops()


def kept(policy):
    with torch.no_grad(), ending(policy.blocks, policy.start) as seen:
        policy.hidden(IDS, None, None)
    return seen[0]


def test_the_cost_of_full_training():
    assert cost(model()) == (108003328, 216006656)
    assert L * (F_LIN + F_ATT) + F_HEAD == 108003328 and 216006656 == 2 * 108003328


@pytest.mark.parametrize("layer, backward, cached, plain_share, cached_share", [
    (0, 131072000, 108003328, .7379, .7379), (1, 112197632, 90177536, .6796, .6246), (2, 93323264, 72351744, .6214, .5113),
    (3, 74448896, 54525952, .5631, .3981), (4, 55574528, 36700160, .5049, .2848), (5, 36700160, 18874368, .4466, .1715),
])  # fmt: skip
def test_the_cost_of_one_layer(layer, backward, cached, plain_share, cached_share):
    """Sheet 6.2; the head's frozen matrix needs its input's gradient only, so its backward is F_HEAD."""
    policy = model(layer)
    assert policy.start == layer
    assert cost(policy) == (108003328, backward)
    assert backward == sum(F_LIN * (1 + (j == layer)) + 2 * F_ATT for j in range(layer, L)) + F_HEAD
    assert (108003328 + backward) / (3 * 108003328) == pytest.approx(plain_share, abs=5e-5)
    assert (cached + backward) / (3 * 108003328) == pytest.approx(cached_share, abs=5e-5)
    if layer:
        assert cost(policy, kept(policy)) == (cached, backward)


@pytest.mark.parametrize("layer", range(L))
def test_no_activation_is_stored_below_the_trained_layer(layer):
    """Section 7.5: bytes that autograd keeps, by the block during whose forward they were saved."""
    policy, stored, now = model(layer), [0] * L, [None]
    parameters = {value.untyped_storage().data_ptr() for value in policy.model.parameters()}
    for index, block in enumerate(policy.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: now.__setitem__(0, index))
        block.register_forward_hook(lambda *_: now.__setitem__(0, None))

    def keep(tensor):
        if now[0] is not None and tensor.untyped_storage().data_ptr() not in parameters:
            stored[now[0]] += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.model(input_ids=IDS, use_cache=False)
    assert not any(stored[:layer]) and all(stored[layer:])
    assert len(set(stored[layer + 1 :])) <= 1 and stored[layer] > max([0, *stored[layer + 1 :]])


def gradients(policy, states=None):
    policy.model.zero_grad()
    with policy._from(states):
        (policy.model(input_ids=IDS, use_cache=False).logits.log_softmax(-1)[..., 3] ** 2).mean().backward()
    return {name: value.grad for name, value in policy.model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("layer", range(L))
def test_the_gradient_is_the_slice_of_the_full_one_bit_for_bit(layer):
    """Sheet 6.3: no difference at all without kept states, and rounding of float64 with them."""
    full, policy = gradients(model(double=True)), model(layer, double=True)
    alone = gradients(policy)
    assert set(alone) == {name for name in full if name.startswith(f"model.layers.{layer}.")}
    assert all(torch.equal(alone[name], full[name]) for name in alone)
    if layer:
        cached = gradients(policy, kept(policy))
        assert max(float((cached[name] - full[name]).abs().max()) for name in alone) < 1e-14


def test_sizes_of_the_small_model():
    """Sheet 6.3: 402240 parameters, 65664 in a layer; 16 P bytes for all, 2 P + 14 P_S for one layer."""
    policy = model(2)
    total = sum(value.numel() for value in policy.model.parameters())
    trained = sum(value.numel() for value in policy.model.parameters() if value.requires_grad)
    assert (total, trained, 16 * total, 2 * total + 14 * trained) == (402240, 65664, 6435840, 1723776)


# --------------------------------------------------------------------------------------------------------- whole runs

THREE = [*SMALL, "model.layers=3", "model.width=16"]
MIDDLE = ["steps=2", "params=single_layer", "update.mini_batches=2", "plugins.grpo.kl_coef=0.1", "checkpoint.every=0"]


def digest(run_dir):
    return hashlib.sha256((Path(run_dir) / "model" / "model.safetensors").read_bytes()).hexdigest()


def test_frozen_weights_keep_their_bits_and_the_layer_moves(tmp_path):
    """Section 7.1, under weight decay."""
    train(tmp_path / "still", "steps=1", "lr=0", small=THREE)
    train(tmp_path / "run", "steps=3", "params=single_layer", "optim.weight_decay=0.1", small=THREE)
    start, end = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("still", "run"))
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved and all(name.startswith("model.layers.1.") for name in moved)


def test_optimizer_and_checkpoint_hold_the_trained_layer_alone(tmp_path):
    """Section 7.4."""
    train(tmp_path / "run", "steps=1", "params=single_layer", small=THREE)
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    saved = load_file(folder / "trained.safetensors")
    final = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert set(saved) == {name for name in final if name.startswith("model.layers.1.")}
    assert all(torch.equal(saved[name], final[name]) for name in saved) and not (folder / "model").exists()
    state = torch.load(folder / "trainer.pt", weights_only=True)
    moments = state["optimizer"]["state"].values()
    assert len(moments) == len(saved)
    assert sum(m["exp_avg"].numel() for m in moments) == sum(value.numel() for value in saved.values())
    train(tmp_path / "full", "steps=1", small=THREE)
    assert list((tmp_path / "full").glob("checkpoints/step-*/model/model.safetensors"))


def test_a_run_of_one_layer_resumes_bit_for_bit(tmp_path, monkeypatch):
    """Stopped at every point, with a reference and two updates per batch: kept states are computed again, to the bit."""
    train(tmp_path / "straight", *MIDDLE, small=THREE)
    for moment in range(7):
        folder, calls = tmp_path / str(moment), itertools.count()
        with monkeypatch.context() as patch:
            patch.setattr(Run, "stopping", lambda run, calls=calls, moment=moment: next(calls) == moment)
            train(folder, *MIDDLE, small=THREE, status=128)
        train(folder, *MIDDLE, f"resume={folder}", small=THREE)
        assert digest(folder) == digest(tmp_path / "straight")
        assert metrics(folder) == metrics(tmp_path / "straight")


def test_another_base_or_another_layer_is_refused_on_resume(tmp_path):
    model = [item for item in THREE if not item.startswith("model.")]
    train(tmp_path / "base", "steps=1", "lr=0", small=THREE)
    base = [f"model.path={tmp_path / 'base' / 'model'}", "params=single_layer"]
    train(tmp_path / "run", "steps=1", *base, small=model)
    train(tmp_path / "run", "steps=2", *base, f"resume={tmp_path / 'run'}", small=model)
    with pytest.raises(UserError, match=r"plugins\.layers\.layer: None then, 2 now"):
        train(tmp_path / "run", "steps=3", *base, "plugins.layers.layer=2", f"resume={tmp_path / 'run'}", small=model)
    train(tmp_path / "other", "steps=1", "lr=1e-3", small=THREE)
    (tmp_path / "other" / "model" / "model.safetensors").replace(tmp_path / "base" / "model" / "model.safetensors")
    with pytest.raises(UserError, match="not those that the run started from"):
        train(tmp_path / "run", "steps=3", *base, f"resume={tmp_path / 'run'}", small=model)


@pytest.mark.parametrize("more", [[], ["update.shared_prefix=false"], ["update.gradient_checkpointing=true"]])
def test_kept_states_change_rounding_only_and_are_computed_once_per_batch(tmp_path, monkeypatch, more):
    """Section 7.2."""
    options = ["steps=3", "params=middle", "plugins.layers.middle=1", "update.mini_batches=2", "update.epochs=2", "lr=1e-3",
               "plugins.grpo.kl_coef=0.1", *more]  # fmt: skip
    train(tmp_path / "plain", *options, "update.prefix_cache=false", small=THREE)
    computed = []
    for name in ("_prefix_shared", "_prefix_plain"):
        real = getattr(Policy, name)
        monkeypatch.setattr(
            Policy, name, lambda policy, rollouts, real=real: computed.append(len(rollouts)) or real(policy, rollouts)
        )
    train(tmp_path / "kept", *options, small=THREE)
    assert computed == [16, 16, 16]
    assert difference(tmp_path / "kept", tmp_path / "plain") < 1e-6


def test_states_are_not_kept_where_one_pass_reads_them(tmp_path, monkeypatch):
    monkeypatch.setattr(Policy, "_prefix_shared", lambda *_: 1 / 0)
    train(tmp_path / "run", "steps=2", "params=single_layer", small=THREE)


def test_kept_states_are_gone_after_the_batch(tmp_path, monkeypatch):
    there = []
    record = Run.record
    monkeypatch.setattr(
        Run, "record", lambda run, step, *rest: there.append(run.policy.prefix is not None) or record(run, step, *rest)
    )
    measure = Passes.measure
    monkeypatch.setattr(
        Passes, "measure", lambda self, rows: (measure(self, rows), there.append(self.policy.prefix.bytes > 0))[0]
    )
    train(tmp_path / "run", *MIDDLE, small=THREE)
    assert there == [False, True, False, True, False]  # step 0 measures the start


def test_a_reference_that_follows_the_layer_survives_a_resume(tmp_path):
    options = ["algo=[kl,reference]", "plugins.reference.every=1", "plugins.reference.share=0.5", "params=single_layer"]
    train(tmp_path / "straight", "steps=4", *options, small=THREE)
    train(tmp_path / "run", "steps=2", *options, small=THREE)
    train(tmp_path / "run", "steps=4", *options, f"resume={tmp_path / 'run'}", small=THREE)
    assert digest(tmp_path / "run") == digest(tmp_path / "straight")
    train(tmp_path / "fixed", "steps=4", "algo=kl", "params=single_layer", small=THREE)
    assert difference(tmp_path / "fixed", tmp_path / "straight") > 1e-6


def test_the_kl_to_the_start_is_exactly_zero_at_the_first_update(tmp_path):
    """Section 7.3."""
    train(tmp_path / "run", "steps=2", "params=single_layer", "algo=kl", small=THREE)
    first, second = (line["kl/kl"] for line in metrics(tmp_path / "run") if "kl/kl" in line)
    assert first == 0.0 and second > 0


OTHERS = {  # methods that ask the model for more, and their options
    "ppo": ["plugins.ppo.critic=model"],
    "[ppo,kl]": ["plugins.ppo.critic=head", "plugins.kl.form=reward", "plugins.kl.estimator=k1"],
    "luffy": [],
    "[kl,reference]": ["plugins.reference.every=1", "plugins.reference.share=1.0"],
    "[gspo,stare]": ["sampler=qmc", "plugins.stare.target_entropy=99", "plugins.stare.reweight_w=3"],
}


@pytest.mark.parametrize("algo", OTHERS)
def test_methods_that_ask_the_model_for_more_find_the_same_and_resume(tmp_path, algo):
    """A critic, given completions, a reference that is copied, weights over the step: with kept states and without."""
    options = [
        f"algo={algo}",
        *OTHERS[algo],
        "params=middle",
        "plugins.layers.middle=1",
        "update.mini_batches=2",
        "lr=1e-3",
    ]
    train(tmp_path / "plain", "steps=2", *options, "update.prefix_cache=false", small=THREE)
    train(tmp_path / "kept", "steps=2", *options, small=THREE)
    assert difference(tmp_path / "kept", tmp_path / "plain") < 2e-6
    train(tmp_path / "run", "steps=1", *options, small=THREE)
    train(tmp_path / "run", "steps=2", *options, f"resume={tmp_path / 'run'}", small=THREE)
    assert digest(tmp_path / "run") == digest(tmp_path / "kept")


STACK = [
    "algo=[gspo,stare]",
    "sampler=qmc",
    "params=middle",
    "plugins.stare.target_entropy=99",
    "update.mini_batches=2",
]


@pytest.mark.slow
def test_the_stack_resumes_bit_for_bit_after_kills(tmp_path):
    """Sequence ratio, token weights, coupled samples and two layers of three; SIGKILL at random moments, resume=auto."""
    options = [*STACK, "task.train=null", "task.heldout=null", "steps=40", "checkpoint.every=1"]
    train(tmp_path / "straight", *options, small=THREE)
    still = [*STACK, "steps=1", "lr=0"]
    train(tmp_path / "still", *still, small=THREE)
    chance, kills = random.Random(0), 0
    while kills < 6:
        arguments = [*THREE, f"run_dir={tmp_path / 'run'}", *options, "resume=auto"]
        process = processes.start(arguments, tmp_path)
        wait_for_work(tmp_path / "run", process.is_alive, chance.uniform(0, 0.4))
        if not process.is_alive():
            break
        process.kill()
        process.join()
        kills += 1
    assert kills >= 3
    train(tmp_path / "run", *options, "resume=auto", small=THREE)
    assert digest(tmp_path / "run") == digest(tmp_path / "straight")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")
    rewards = [line["reward/total_mean"] for line in metrics(tmp_path / "run") if "reward/total_mean" in line]
    assert sum(rewards[-10:]) > sum(rewards[:10])  # and it learns
    start, end = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("still", "run"))
    moved = {name.split(".")[2] for name in start if not torch.equal(start[name], end[name])}
    assert moved == {"0", "1"}  # floor(3 / 2 - 1), floor(3 / 2 + 1) - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [MIDDLE, ["algo=[ppo,kl]", "plugins.ppo.critic=head", "params=middle", "steps=2"], [*STACK, "steps=2"]]
)
def test_two_processes_make_the_update_of_one(tmp_path, method):
    options = [*method, "prompts_per_step=3", "lr=1e-3"]
    train(tmp_path / "one", *options, small=THREE)
    processes.two([*THREE, *options, f"run_dir={tmp_path / 'two'}"], tmp_path)
    assert difference(tmp_path / "one", tmp_path / "two") < 1e-6


@pytest.mark.parametrize("overrides", [
    ["params=single_layer"], ["params=single_layer", "plugins.layers.layer=-1"], ["params=middle"], ["params=layers", "plugins.layers.which=[0]"],
    ["params=layers", "plugins.layers.random=1"],
])  # fmt: skip
def test_it_conforms(overrides):
    assert "parameters" in check_plugin("layers", *overrides)


def test_profiles_conform(profile):
    file = f"plugins.layers.profile={profile([0.3, 0.4])}"
    assert "parameters" in check_plugin("layers", "params=top", "plugins.layers.top=1", file)
    assert "parameters" in check_plugin("layers", "params=layers", "plugins.layers.boost=1", file)


# ---------------------------------------------------------------------------------------------------------- the scan


def test_contributions_of_the_published_scores():
    """Sheet 6.1: base 44.1, full 50.8; layers 10, 24 and 2."""
    found = [layer_scan.contribution(alone, 44.1, 50.8) for alone in (51.8, 46.1, 51.1)]
    assert found == pytest.approx([1.149254, 0.298507, 1.044776], abs=1e-6)
    assert layer_scan.contribution(50.8, 44.1, 50.8) == 1 and layer_scan.contribution(44.1, 44.1, 50.8) == 0


@given(st.floats(-2, 2), st.floats(0.1, 5), st.floats(-9, 9))
@settings(max_examples=60, deadline=None)
def test_contributions_do_not_depend_on_the_unit_of_the_score(alone, factor, shift):
    """Section 7.7."""
    plain = layer_scan.contribution(alone, 0.25, 0.75)
    scaled = layer_scan.contribution(*(factor * score + shift for score in (alone, 0.25, 0.75)))
    assert scaled == pytest.approx(plain, abs=1e-9)


@pytest.mark.parametrize(
    "full, noise, defined", [(0.5, 0.0, False), (0.4, 0.0, False), (0.55, 0.06, False), (0.55, 0.04, True)]
)
def test_no_contribution_without_a_gain_beyond_the_noise(full, noise, defined):
    assert math.isnan(layer_scan.contribution(0.7, 0.5, full, noise)) is not defined


def test_rank_correlation_with_ties():
    """Sheet 6.1: average ranks."""
    one, two = [0.2, 0.9, 1.1, 0.7, 0.7, 0.1], [0.3, 0.8, 1.0, 0.9, 0.6, 0.2]
    assert layer_scan.rank_correlation(one, two) == pytest.approx(0.898645, abs=1e-6)
    assert layer_scan.rank_correlation(one, [1.0] * 6) is None and layer_scan.rank_correlation(one[:2], two[:2]) is None


def finished(folder, name, *scores):
    (folder / name).mkdir()
    lines = [{"step": step, "heldout/avg@8": value} for step, value in enumerate(scores)]
    (folder / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder / name


def test_a_profile_averages_over_the_seeds(tmp_path):
    """Gains of full training .3 and .5: mean .4, twice the standard error of the mean 2 * .1 = .2. Layer 1: .3 and .5 of
    .2, so C = (.4 - .2) / .4 = .5 with error .1 / .4 = .25; layer 0: .2, so C = 0."""
    full = [finished(tmp_path, "a", 0.2, 0.5), finished(tmp_path, "b", 0.2, 0.9, 0.7)]
    alone = {
        0: [finished(tmp_path, "c", 0.2, 0.2)] * 2,
        1: [finished(tmp_path, n, 0.2, s) for n, s in (("d", 0.3), ("e", 0.5))],
    }
    result = layer_scan.profile("heldout/avg@8", [0, 1], 2, full, alone)
    assert (result["base"], result["full"], result["noise"]) == pytest.approx((0.2, 0.6, 0.2))
    assert result["C"] == pytest.approx({"0": 0.0, "1": 0.5}) and result["C_error"] == pytest.approx(
        {"0": 0.0, "1": 0.25}
    )
    assert "| layer 1 | 0.4000 | 0.50 ± 0.25 |" in layer_scan.table(result)
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(result))
    assert layers(top=1, profile=str(file)).choose(2) == [1]
    with pytest.raises(UserError, match=r"no 'accuracy'(.|\n)*heldout/avg@8"):
        layer_scan.profile("accuracy", [0], 2, full, alone)


@pytest.mark.parametrize("arguments, message", [
    (["--layer", "1"], "no option --layer"), (["--seeds"], "--seeds needs a value"), (["--seeds", "a"], "--seeds=a"),
    (["params=full"], "layer-scan sets params itself"), (["plugins.layers.layer=1"], "sets plugins.layers.layer itself"),
    (["lr=-1"], "lr is at least 0"), (["stpes=1"], "Could not override 'stpes'"),
])  # fmt: skip
def test_mistakes_are_found_before_anything_trains(arguments, message, monkeypatch):
    monkeypatch.setattr(layer_scan, "train", lambda *_: pytest.fail("trained"))
    with pytest.raises(Exception, match=message):
        layer_scan.run(arguments)


def test_a_scan_trains_full_and_each_layer_once(tmp_path, capsys, monkeypatch):
    def forked(command):
        assert command[:3] == [sys.executable, "-m", "grpozoo"]
        process = processes.start(command[3:], tmp_path)
        process.join()
        return SimpleNamespace(returncode=process.exitcode)

    monkeypatch.setattr(layer_scan.subprocess, "run", forked)
    options = [item for item in THREE if not item.startswith(("eval.samples", "model.layers"))]
    arguments = ["--layers", "0,-1", "--folder", str(tmp_path), *options, "model.layers=2", "steps=1", "eval.samples=0"]
    assert layer_scan.run(arguments) == 0
    assert "training layer-1, seed 0" in capsys.readouterr().out
    assert sorted(json.loads((tmp_path / "profile.json").read_text())["scores"]) == ["0", "1"]
    assert layer_scan.run(arguments) == 0 and "training" not in capsys.readouterr().out.replace("full training", "")
    with pytest.raises(UserError, match="other options"):
        layer_scan.run([*arguments, "steps=2"])
