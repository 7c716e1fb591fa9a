"""Policies and their tokenizers: the tiny decoder, SmolLM2 from its package, and any causal language model by path.

    check(config)                   what can be refused before anything heavy is imported
    load(config, task, device)      the model in evaluation mode, and its tokenizer

Dropout is switched off at load, whatever the model's config says: a policy is sampled and scored by the same law.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpozoo.errors import UserError, nearest
from grpozoo.models.files import dtype_of, quiet
from grpozoo.models.smollm2 import gguf_file, smollm2_folder
from grpozoo.models.tiny import tiny_model, tiny_tokenizer
from grpozoo.models.warm_start import ensure

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NOISE = re.compile(r"drop(out|_path)|(_p|layer)drop|jitter_noise")  # config entries that make a forward pass random


def check(config: Any) -> None:
    """Refuse a model that cannot be loaded, without importing torch. Hub names are only looked up by `load`."""
    if config.path is not None:
        _check_path(config)
    elif config.kind == "smollm2":
        gguf_file()
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
        with quiet():
            model, tokenizer = _pretrained(str(smollm2_folder()), config)
    elif config.warm_start:
        folder = ensure(config, task)
        with quiet():
            model, tokenizer = _pretrained(str(folder), config)
    else:
        model, tokenizer = tiny_model(config, seed), tiny_tokenizer()
        model = model.to(dtype=dtype_of(config.dtype))
    _finish(model, tokenizer, config)
    return model.to(device).eval(), tokenizer


# ----------------------------------------------------------------------------------------------------- the tiny policy


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
            dtype=dtype_of(config.dtype),
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
