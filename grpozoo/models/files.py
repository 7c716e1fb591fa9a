"""A model's folder in Hugging Face format: written, and read back into the same parameters."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpozoo.models.weights import check_files, inside, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Weights (safetensors), config, generation config, tokenizer and chat template: what `from_pretrained` reads."""
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def restore(model: PreTrainedModel, folder: Path) -> None:
    """Put the weights that `save` wrote back into the model, bit for bit; parameters stay the same objects."""
    check_files(str(folder), inside(folder))
    options = {"dtype": model.dtype, "local_files_only": True, "use_safetensors": True}
    with quiet():  # by way of transformers, because it may save under other names than a model uses
        saved = whole(type(model), str(folder), str(folder), **options)
    model.load_state_dict(saved.state_dict())


def dtype_of(name: str) -> Any:
    import torch

    return getattr(torch, name)


@contextmanager
def quiet():
    """Without transformers' bars, for what takes a blink."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
