"""A policy is the model that its folder describes, or it is refused: weights, headers, causality, stop ids."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from grpozoo import UserError, models
from grpozoo.config import Model
from grpozoo.models.loading import explained

SMALL = {"layers": 1, "width": 16, "heads": 2}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
    """A saved one-layer model of tied embeddings."""
    models.save(models.tiny_model(Model(**SMALL), seed=3), models.tiny_tokenizer(), tmp_path / "model")
    return tmp_path / "model"


def load(folder, **options):
    return models.load(Model(path=str(folder), **options), task=None)


def rewrite(folder, change):
    """The weights of the folder after change(weights), which changes them in place."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def rename(weights):
    for key in list(weights):
        weights[f"policy.{key}"] = weights.pop(key)


CHANGES = {
    "a missing key": (lambda w: w.pop(Q_PROJ), f"missing, and random if we went on: {Q_PROJ}$"),
    "renamed keys": (rename, "missing.* and 12 more\nunknown to Qwen3ForCausalLM: policy.* and 11 more"),
    "an unexpected key": (lambda w: w.update(extra=torch.ones(1)), "unknown to Qwen3ForCausalLM: extra$"),
    "another shape": (lambda w: w.update({Q_PROJ: torch.ones(8, 16)}), r"q_proj.weight: \[8, 16\] in the file, \[16, 16\]"),
    "NaN": (lambda w: w["model.norm.weight"].fill_(torch.nan), "NaN or infinite: model.norm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_weights_that_are_not_those_of_the_config_are_refused(folder, case, caplog):
    change, message = CHANGES[case]
    rewrite(folder, change)
    with pytest.raises(UserError, match=message):
        load(folder)
    assert "LOAD REPORT" not in caplog.text  # the sentence says it


@pytest.mark.parametrize("case", CHANGES)
def test_restoring_a_checkpoint_refuses_the_same(folder, case):
    change, message = CHANGES[case]
    rewrite(folder, change)
    model = models.tiny_model(Model(**SMALL))
    before = model.lm_head.weight.clone()
    with pytest.raises(UserError, match=message):
        models.restore(model, folder)
    assert torch.equal(model.lm_head.weight, before)


def test_an_untied_head_that_is_missing_is_refused_and_a_tied_one_is_not(folder):
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model, _ = load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    edit(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"random if we went on: lm_head.weight$"):
        load(folder)


def test_buffers_that_transformers_ignores_may_be_in_the_file(tmp_path):
    shape = GPT2Config(vocab_size=97, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
    models.save(GPT2LMHeadModel(shape), models.tiny_tokenizer(), tmp_path)
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool)
    rewrite(tmp_path, lambda w: w.update({"transformer.h.0.attn.bias": mask}))  # as in GPT-2's own file
    assert load(tmp_path)[0].config.n_positions == 32


@pytest.mark.parametrize("dtype, name", [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_weights_that_are_not_floating_point_are_refused_by_their_header(folder, dtype, name):
    rewrite(folder, lambda w: w.update({Q_PROJ: w[Q_PROJ].to(dtype)}))
    with pytest.raises(UserError, match=f"{Q_PROJ} of type {name}\n"):
        models.check(Model(path=str(folder)))
    with pytest.raises(UserError, match=f"of type {name}"):
        models.restore(models.tiny_model(Model(**SMALL)), folder)


def test_pickled_weights_are_looked_at_in_the_same_way(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights | {Q_PROJ: weights[Q_PROJ].to(torch.int8)}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=f"{Q_PROJ} of type torch.int8\n"):
        load(folder, allow_pickle=True)
    torch.save({key: value for key, value in weights.items() if key != Q_PROJ}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=f"random if we went on: {Q_PROJ}$"):
        load(folder, allow_pickle=True)
    (folder / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(UserError, match="not a whole file of weights"):
        load(folder, allow_pickle=True)


def test_a_quantised_config_is_refused(folder):
    edit(folder / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    with pytest.raises(UserError, match="is quantised"):
        load(folder)


@pytest.mark.parametrize("cut", [4, 500, -1])
def test_half_a_file_is_found_without_reading_it(folder, cut):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:cut])
    with pytest.raises(UserError, match="not a whole file of weights"):
        models.check(Model(path=str(folder)))


def test_an_index_that_names_pickle_beside_a_decoy_needs_consent(folder):
    (folder / "model.safetensors").rename(folder / "decoy.safetensors")
    weights = models.tiny_model(Model(**SMALL), seed=4).state_dict()
    torch.save(weights, folder / "weights.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "weights.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="names 'weights.bin'.*\n.*model.allow_pickle=true"):
        models.check(Model(path=str(folder)))
    edit(folder / "config.json", transformers_weights="model.safetensors.index.json")
    with pytest.raises(UserError, match="names 'weights.bin'"):
        models.restore(models.tiny_model(Model(**SMALL)), folder)
    model, _ = load(folder, allow_pickle=True)
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])


def test_a_hub_model_is_looked_at_in_the_same_way(folder, monkeypatch):
    from grpozoo.models import loading

    rewrite(folder, lambda w: w.update({Q_PROJ: w[Q_PROJ].to(torch.int8)}))
    monkeypatch.setattr(loading, "_is_local", lambda path: False)
    with pytest.raises(UserError, match=f"{Q_PROJ} of type I8"):
        load(folder)


@pytest.mark.parametrize("files", [{"config.json": "[]"}, {"config.json": "{"}, {"config.json": "[" * 99999},
                                   {"model.safetensors.index.json": '{"weight_map": 3}'}, {"adapter_config.json": "{}"},
                                   {"model.safetensors.index.json": '{"weight_map": {"a": "gone.safetensors"}}'}])  # fmt: skip
def test_damaged_files_are_a_users_error(folder, files):
    (folder / "model.safetensors").rename(folder / "elsewhere.safetensors")
    for name, content in files.items():
        (folder / name).write_text(content)
    with pytest.raises(UserError, match=str(folder)):
        models.check(Model(path=str(folder)))


@pytest.mark.parametrize("path", ["a" * 100_000, "/" + "b" * 5000, "~nobody-of-this-name/x", "a\0b"])
def test_paths_that_no_system_knows_are_a_users_error_of_bearable_length(path):
    with pytest.raises(UserError) as caught:
        models.load(Model(path=path), task=None)
    assert len(str(caught.value)) < 2000


# --- what a model must be


def bert(**more):
    return BertLMHeadModel(
        BertConfig(
            vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            bos_token_id=0, eos_token_id=0, pad_token_id=0, **more,
        )
    )  # fmt: skip


def test_an_encoder_is_refused_and_the_same_model_as_a_decoder_is_not(tmp_path):
    models.save(bert(), models.tiny_tokenizer(), tmp_path / "encoder")
    with pytest.raises(UserError, match="BertLMHeadModel is not causal"):
        load(tmp_path / "encoder")
    models.save(bert(is_decoder=True), models.tiny_tokenizer(), tmp_path / "decoder")
    assert type(load(tmp_path / "decoder")[0]) is BertLMHeadModel


@pytest.mark.parametrize("listed", ["0", 97, -1, 1.5, True, [0, 97], [None], {"a": 0}])
def test_stop_ids_that_are_no_tokens_are_refused(folder, listed):
    edit(folder / "generation_config.json", eos_token_id=listed)
    with pytest.raises(UserError, match="eos_token_id"):
        load(folder)


@pytest.mark.parametrize("changes", [
    {"eos_token_id": "zero"}, {"pad_token_id": 12345}, {"hidden_size": 0}, {"num_attention_heads": 3, "head_dim": 5},
    {"num_hidden_layers": "many"}, {"hidden_act": "relax"}, {"model_type": "nothing"}, {"vocab_size": -1},
])  # fmt: skip
def test_a_config_that_makes_no_model_is_one_sentence(folder, changes):
    edit(folder / "config.json", **changes)
    with pytest.raises(UserError, match="model.path=") as caught:
        load(folder)
    assert len(str(caught.value).splitlines()) <= 4


def test_an_odd_head_size_is_refused_before_a_model_is_built():
    with pytest.raises(UserError, match="model.width / model.heads is 25 and must be even"):
        Model(width=100, heads=4).check()
    Model(width=96, heads=4).check()


@pytest.mark.parametrize("options", [{}, {"warm_start": False}, {"path": "."}])
def test_an_unknown_attention_gets_the_choices(folder, monkeypatch, options):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=r"unknown model.attention 'spda', did you mean 'sdpa'\?\navailable: .*eager"):
        models.load(Model(attention="spda", **options), task=None)


def test_an_error_is_searched_whole_and_shown_in_part():
    with pytest.raises(UserError, match="trust_remote_code=true") as caught, explained("m", Model()):
        raise ValueError("x" * 10**6 + " set trust_remote_code")
    assert len(str(caught.value)) < 500


def test_the_probe_leaves_no_trace(folder):
    model, _ = load(folder)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks
    twin = Qwen3ForCausalLM(Qwen3Config.from_pretrained(folder)).eval()
    twin.load_state_dict(model.state_dict())
    ids = torch.arange(9)[None]
    assert torch.equal(model(ids).logits, twin(ids).logits)


def test_the_loggers_filter_is_taken_off_again(folder):
    before = list(logging.getLogger("transformers.modeling_utils").filters)
    load(folder)
    assert logging.getLogger("transformers.modeling_utils").filters == before
