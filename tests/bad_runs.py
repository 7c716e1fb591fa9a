"""Bad model folders and bad runs to resume: made from one good folder of each, and damaged."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from bad_inputs import Case
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertLMHeadModel

from grpozoo import models
from grpozoo.compose.command import compose
from grpozoo.config import Model
from grpozoo.run.checkpoint import CHECKSUMS, Store

Q = "model.layers.0.self_attn.q_proj.weight"
CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@cache
def good() -> Path:
    """One layer, tied embeddings, the tiny policy's tokenizer."""
    folder = Path(mkdtemp()) / "model"
    models.save(models.tiny_model(Model(layers=1, width=16, heads=2), seed=3), models.tiny_tokenizer(), folder)
    return folder


def weights(change):
    """A function that rewrites the weights of {here}/model after change(weights)."""

    def damage(folder):
        file = folder / "model.safetensors"
        found = load_file(file)
        change(found)
        save_file(found, file, metadata={"format": "pt"})

    return damage


def edit(name, **values):
    """A function that sets keys of a JSON file."""

    def damage(folder):
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return damage


def write(name, content):
    def damage(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return damage


def drop(name):
    return lambda folder: (folder / name).unlink()


def renamed(found):
    for key in list(found):
        found[f"policy.{key}"] = found.pop(key)


def decoy(folder):
    (folder / "model.safetensors").rename(folder / "decoy.safetensors")
    index = {"metadata": {}, "weight_map": {Q: "weights.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def encoder(folder):
    shape = BertConfig(
        vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    shutil.rmtree(folder)
    models.save(BertLMHeadModel(shape), models.tiny_tokenizer(), folder)


def template(text):
    return edit("tokenizer_config.json", chat_template=text)


EARLY = {  # found before anything heavy is imported
    "without config": (drop("config.json"), "has no config.json"),
    "empty config": (write("config.json", ""), "config.json cannot be read"),
    "half a config": (write("config.json", "{"), "config.json cannot be read"),
    "list as config": (write("config.json", "[]"), "config.json holds no JSON object"),
    "deep config": (write("config.json", "[" * 99999), "config.json cannot be read"),
    "binary config": (write("config.json", b"\xff\xfe\x00"), "config.json cannot be read"),
    "without weights": (drop("model.safetensors"), "has no .safetensors file"),
    "empty weights": (write("model.safetensors", ""), "not a whole file of weights"),
    "half the weights": (lambda f: write("model.safetensors", (f / "model.safetensors").read_bytes()[:-9])(f), "not a whole file of weights"),
    "text for weights": (write("model.safetensors", "x" * 999), "not a whole file of weights"),
    "pickle": (pickled, "model.allow_pickle=true"),
    "decoy": (decoy, "names 'weights.bin'"),
    "int8": (weights(lambda w: w.update({Q: w[Q].to(torch.int8)})), "not floating-point numbers"),
    "float8": (weights(lambda w: w.update({Q: w[Q].to(torch.float8_e4m3fn)})), "not floating-point numbers"),
    "adapter": (write("adapter_config.json", "{}"), "is an adapter of another model"),
    "odd index": (lambda f: [drop("model.safetensors")(f), write("model.safetensors.index.json", "3")(f)], "holds no JSON object"),
    "index of nothing": (lambda f: [drop("model.safetensors")(f), write("model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}')(f)], "there is no such file"),
}  # fmt: skip
LATE = {  # what only the loading shows
    "missing key": (weights(lambda w: w.pop(Q)), "missing, and random if we went on"),
    "renamed keys": (weights(renamed), "unknown to Qwen3ForCausalLM"),
    "more keys": (weights(lambda w: w.update(extra=torch.ones(1))), "unknown to Qwen3ForCausalLM: extra"),
    "another shape": (weights(lambda w: w.update({Q: torch.ones(8, 16)})), "of another shape"),
    "NaN": (weights(lambda w: w["model.norm.weight"].fill_(torch.nan)), "NaN or infinite: model.norm.weight"),
    "untied head": (edit("config.json", tie_word_embeddings=False), "lm_head.weight"),
    "quantised": (edit("config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}), "is quantised"),
    "unknown kind": (edit("config.json", model_type="nothing"), "does not load"),
    "no layers": (edit("config.json", num_hidden_layers="many"), "does not load"),
    "encoder": (encoder, "is not causal"),
    "odd stop": (edit("generation_config.json", eos_token_id=9999), "eos_token_id '9999' is no token"),
    "no tokenizer": (lambda f: [drop("tokenizer.json")(f), drop("tokenizer_config.json")(f)], "has no tokenizer"),
    "odd tokenizer": (write("tokenizer.json", "{}"), "does not load"),
    "odd template": (template("{% for"), "chat template is not valid"),
    "refusing template": (template("{{ raise_exception('no') }}"), "chat template refuses prompt"),
}  # fmt: skip


def model_folders() -> list[Case]:
    found = []
    for late, table in ((False, EARLY), (True, LATE)):
        for name, (damage, message) in table.items():

            def prepare(folder, damage=damage):
                shutil.copytree(good(), folder / "model")
                damage(folder / "model")

            chat = ("model.chat_template=true",) if "template" in name else ()
            found.append(Case(f"model {name}", ("model.path={here}/model", *chat), message, prepare, late))
    return found


PATHS = [
    ("nowhere", "model.path={here}/nowhere", "there is no such folder"),
    ("a file", "model.path={here}/file", "is a file; give the folder"),
    ("an empty folder", "model.path={here}", "has no config.json"),
    ("empty", "model.path=''", "model.path is empty"),
    ("long", f"model.path=/{'b' * 5000}", "model.path="),
    ("nobody's home", "model.path='~nobody-of-this-name/x'", "model.path=.* cannot be read"),
    ("a NUL", "model.path=/a\0b", "model.path"),
    ("of the tiny policy's shape", "model.path={here} model.layers=3", "shapes model=tiny only"),
]


def model_paths() -> list[Case]:
    return [
        Case(f"model.path {name}", tuple(w.split()), message, lambda f: (f / "file").touch())
        for name, w, message in PATHS
    ]


# --- runs: (name, what is done to the configuration before it is sealed, to the run afterwards, the words, the message)


def saved(folder, change, damage, *words):
    """A run with one checkpoint of step 1, as far as its configuration goes."""

    def writer(partial):
        change(partial, config := compose(list(words)))
        if not (partial / "config.yaml").exists():
            OmegaConf.save(config, partial / "config.yaml")
        (partial / "manifest.json").write_text("{}")

    damage(Store(folder / "old" / "checkpoints").save(1, writer))


def nothing(*_):
    """No damage."""


def as_config(content):
    return lambda partial, config: (partial / "config.yaml").write_bytes(content)


def note(**values):
    return edit(CHECKSUMS, **values)


RUNS = [
    ("another lr", nothing, nothing, "lr=1", "lr: 0.0001 then, 1 now"),
    ("another task", nothing, nothing, "task.level=1", "task.level: .* then, 1 now"),
    ("another seed", nothing, nothing, "seed=7", "seed: 0 then, 7 now"),
    ("another method", nothing, nothing, "algo=gspo", "plugins.gspo"),
    ("another method's option", nothing, nothing, "plugins.grpo.clip=1", "plugins.grpo.clip: 0.2 then, 1 now"),
    ("another folder", nothing, nothing, "run_dir={here}/new", "goes on in its own folder"),
    ("a later format", nothing, note(format=99), "", "saved by a newer grpozoo .*format 99"),
    ("a format of words", nothing, note(format="new"), "", "saved by a newer grpozoo"),
    ("a changed file", nothing, write("manifest.json", "[]"), "", "has no complete checkpoint"),
    ("a lost file", nothing, drop("config.yaml"), "", "has no complete checkpoint"),
    ("no seal", nothing, drop(CHECKSUMS), "", "has no complete checkpoint"),
    ("an odd seal", nothing, write(CHECKSUMS, "[]"), "", "has no complete checkpoint"),
    ("a seal of files that are no table", nothing, note(files=3), "", "has no complete checkpoint"),
    ("a seal of odd entries", nothing, note(files={"config.yaml": 3}), "", "has no complete checkpoint"),
    ("a seal that leaves the folder", nothing, note(files={"../../x": {"bytes": 1, "sha256": ""}}), "", "has no complete checkpoint"),
    ("no configuration", as_config(b""), nothing, "", "config.yaml"),
    ("half a configuration", as_config(b"["), nothing, "", "config.yaml"),
    ("a list as configuration", as_config(b"- 1"), nothing, "", "config.yaml"),
    ("a text as configuration", as_config(b"text"), nothing, "", "config.yaml"),
    ("a binary configuration", as_config(b"\xff\xfe\x00"), nothing, "", "config.yaml"),
    ("a configuration of nothing", as_config(b"{}"), nothing, "", "config.yaml"),
    ("a configuration of code", as_config(b"a: !!python/object/apply:os.system ['true']"), nothing, "", "config.yaml"),
    ("no plugins", lambda _, config: config.update({"plugins": None}), nothing, "", "plugins"),
    ("an unknown plugin", lambda _, config: OmegaConf.update(config, "plugins.stair", {}, force_add=True), nothing, "", "unknown plugin 'stair'"),
    ("an unknown section", lambda _, config: OmegaConf.update(config, "nonsense", 1, force_add=True), nothing, "", "unknown section 'nonsense'"),
    ("code of theirs", lambda _, config: OmegaConf.update(config, "plugins.function", {"path": "/theirs.py:score"}, force_add=True), nothing, "", "runs code: plugins.function.path"),
    ("a model's code", lambda _, config: config.model.update({"trust_remote_code": True}), nothing, "", "runs code: model.trust_remote_code"),
    ("pickle of theirs", lambda _, config: config.model.update({"allow_pickle": True}), nothing, "", "runs code: model.allow_pickle"),
    ("a variable", lambda _, config: config.logger.update({"project": "${oc.env:HOME}"}), nothing, "", "reads the environment variable HOME"),
    ("a variable by another key", lambda _, config: config.logger.update({"project": "${oc.env:${run_dir}}"}), nothing, "", "logger.project"),
]  # fmt: skip
FOLDERS = [
    ("nowhere", "resume={here}/nowhere", "resume: there is no folder"),
    ("the wrong one", "resume={here}", "is neither a run folder"),
    ("a file", "resume={here}/file", "resume: there is no folder"),
    ("a misspelt one", "resume={here}/odl", "did you mean 'old'"),
    ("no checkpoint", "resume={here}/old", "has no complete checkpoint"),
    ("an empty checkpoint", "resume={here}/old/checkpoints/step-00000001", "step-00000001"),
    ("a number", "resume=5", "resume: there is no folder 5"),
    ("a list", "resume=[a]", "resume"),
    ("a switch", "resume=true", "resume"),
    ("a long name", f"resume={'r' * 5000}", "resume"),
    ("nobody's home", "resume='~nobody-of-this-name/x'", "resume"),
    ("a NUL", "resume=a\0b", "resume"),
]


def runs() -> list[Case]:
    found = []
    for name, change, damage, words, message in RUNS:

        def prepare(folder, change=change, damage=damage):
            saved(folder, change, damage)

        found.append(Case(f"resume {name}", ("resume={here}/old", *words.split()), message, prepare))

    def empty(folder):
        (folder / "old" / "checkpoints" / "step-00000001").mkdir(parents=True)
        (folder / "file").touch()

    return found + [Case(f"resume {name}", (words,), message, empty) for name, words, message in FOLDERS]
