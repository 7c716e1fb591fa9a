"""Policies and their tokenizers: the tiny decoder, SmolLM2 from its package, and any causal language model by path.

    check(config)                   what can be refused before anything heavy is imported
    load(config, task, device)      the model in evaluation mode, and its tokenizer

Dropout is switched off at load, whatever the model's config says: a policy is sampled and scored by the same law.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpozoo.errors import UserError, nearest, unknown
from grpozoo.models.files import dtype_of, quiet
from grpozoo.models.probe import check_causal
from grpozoo.models.smollm2 import gguf_file, smollm2_folder
from grpozoo.models.text import try_template
from grpozoo.models.tiny import tiny_model, tiny_tokenizer
from grpozoo.models.warm_start import ensure
from grpozoo.models.weights import CONSENT, Find, check_files, inside, whole

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
    check_attention(config.attention)
    if config.path is not None:
        place = str(Path(config.path).expanduser()) if _is_local(config.path) else config.path
        name = f"model.path={place[:300]}"
        model, tokenizer = _pretrained(place, name, config, task)
    elif config.kind == "smollm2":
        name = "model=smollm2"
        with quiet():
            model, tokenizer = _pretrained(str(smollm2_folder()), name, config, task)
    else:
        name = "model=tiny"
        model, tokenizer = _tiny(name, config, task, seed)
    _finish(model, tokenizer, name)
    with explained(name, config):
        model = model.to(device).eval()
        check_causal(model, name)
    return model, tokenizer


def _tiny(name: str, config: Any, task: Any, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if config.warm_start:
        folder = ensure(config, task)
        with quiet():
            return _pretrained(str(folder), name, config, task)
    with explained(name, config):
        return tiny_model(config, seed).to(dtype=dtype_of(config.dtype)), tiny_tokenizer()


def check_attention(name: str) -> None:
    """Refuse a name that transformers does not know; one with a slash is a kernel from the hub."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = {"eager", *(key for key in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in key)}  # | : for servers
    if name not in known and "/" not in name:
        raise unknown("model.attention", name, known)


def _is_local(path: str) -> bool:
    """A folder that exists, or a spelling that no hub name has (hub names are NAME or OWNER/NAME)."""
    return not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path) or os.path.exists(os.path.expanduser(path))


def _check_path(config: Any) -> None:
    if not config.path:
        raise UserError("model.path is empty: give a folder or a hub name, or drop it to use model=tiny")
    if not _is_local(config.path):
        return
    name = f"model.path={config.path[:300]}"
    try:
        _check_folder(name, Path(config.path).expanduser(), config.allow_pickle)
    except (OSError, RuntimeError) as error:  # not ours to read, a name too long, a ~USER that nobody is
        raise UserError(f"{name} cannot be read: {str(error)[:300]}") from None


def _check_folder(name: str, folder: Path, pickle: bool) -> None:
    if not os.path.exists(folder):
        siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        found = nearest(folder.name, siblings)
        raise UserError(f"{name}: there is no such folder{found}\nlooked for from {Path.cwd()}")
    if not folder.is_dir():
        raise UserError(f"{name} is a file; give the folder that holds it and its config.json")
    if not (folder / "config.json").is_file():
        below = sorted(str(p.parent) for depth in ("*", "*/*") for p in folder.glob(f"{depth}/config.json"))
        hint = f", did you mean {below[-1]!r}?" if below else ""
        raise UserError(f"{name} has no config.json{hint}\na model folder is what save_pretrained() writes")
    check_files(name, inside(folder), pickle)


def _pretrained(place: str, name: str, config: Any, task: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Tokenizer first: it is cheap, and its errors should not wait for the weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    remote = bool(config.trust_remote_code)
    with explained(name, config):
        shape = AutoConfig.from_pretrained(place, trust_remote_code=remote)
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=remote)
        if not set(tokenizer.get_vocab()) - set(
            tokenizer.all_special_tokens
        ):  # what transformers makes of no file at all
            raise UserError(
                f"{name} has no tokenizer: its vocabulary is empty\nput the model's tokenizer.json beside config.json"
            )
    if config.chat_template and not tokenizer.chat_template:
        raise UserError(f"model.chat_template=true: the tokenizer of {name} has no chat template")
    prompts = getattr(task, "train", ())
    if hasattr(prompts, "__len__") and len(prompts):
        try_template(tokenizer, prompts[0], config.chat_template)
    if getattr(shape, "quantization_config", None) is not None:
        raise UserError(f"{name} is quantised, which cannot be trained: use the original with float weights")
    silence(shape)
    if not _is_local(place):
        with explained(name, config):
            check_files(name, _on_hub(place), config.allow_pickle)
    with explained(name, config):
        model = whole(
            AutoModelForCausalLM,
            place,
            name,
            config=shape,
            dtype=dtype_of(config.dtype),
            attn_implementation=config.attention,
            trust_remote_code=remote,
            use_safetensors=None if config.allow_pickle else True,
        )
    return model, tokenizer


def _on_hub(place: str) -> Find:
    """Files of a hub model, fetched into its cache as `from_pretrained` does."""
    from transformers.utils.hub import cached_file

    def find(name: str) -> Path | None:
        quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        found = cached_file(place, name, **quietly)  # without network: what the cache has
        return None if found is None else Path(found)

    return find


@contextmanager
def explained(name: str, config: Any):
    """What transformers and a model's own code raise, which may be anything, as one message."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name} does not load: {_said(error)}\n{_hint(name, config, error)}") from None


def _said(error: Exception) -> str:
    """An error's text on one line of bearable length."""
    text = " ".join(str(error).split())
    return (text if len(text) <= 300 else f"{text[:300]} ...") or type(error).__name__


def _hint(name: str, config: Any, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return "the model brings its own Python code; if you trust it: model.trust_remote_code=true"
    if isinstance(error, OSError) and "safetensors" in text and not config.allow_pickle:
        return CONSENT
    if isinstance(error, OSError) and not _is_local(name.removeprefix("model.path=")):
        return "is the name right, the network up, and (gated models) HF_TOKEN set? ./NAME would be a folder"
    return "a causal language model that transformers loads is needed; see model.dtype and model.attention too"


def silence(shape: Any) -> None:
    """Set every dropout-like entry of a transformers config to 0, in nested configs too."""
    for name, value in vars(shape).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            silence(value)
        elif NOISE.search(name) and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(shape, name, type(value)(0))


def _finish(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """What every engine may rely on: no dropout, a row for every token, stop ids, a pad id, left padding."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0  # also where a model writes its rate into the code
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model only {rows} rows: they don't belong together"
        )
    settings = model.generation_config
    _check_stops(settings.eos_token_id, rows, name)
    if tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    if any(
        getattr(settings, name, None) is not None for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")
    ):
        settings.do_sample = True  # without it transformers refuses to save sampling settings, which many models have
    tokenizer.padding_side = "left"


def _check_stops(listed: Any, rows: int, name: str) -> None:
    """eos_token_id of the generation config (or the config): null, an id or a list of ids."""
    for stop in listed if isinstance(listed, list) else [] if listed is None else [listed]:
        if not isinstance(stop, int) or isinstance(stop, bool) or not 0 <= stop < rows:
            raise UserError(
                f"{name}: eos_token_id {str(stop)[:80]!r} is no token of the model\n"
                f"generation_config.json takes null, an id from 0 to {rows - 1}, or a list of ids"
            )
