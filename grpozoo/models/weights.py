"""Weights in files: refused before they are read where their headers tell, and where the loading report is not clean.

    check_files(name, find, pickle)       no pickle without consent, whole files, floating-point weights; no torch
    whole(loader, place, name, ...)       the model; a key that is missing, unexpected or of another shape is a UserError

transformers fills a missing key with random numbers, drops an unexpected one and casts int8 to float32, each with a
warning at most: a policy that is trained from there is another model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpozoo.errors import UserError

Find = Callable[[str], Path | None]  # a file of the model by its name, None if it has no such file
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of what a weight may be stored as
CONSENT = "weights in pickle format can run code; if you trust them: model.allow_pickle=true"


def inside(folder: Path) -> Find:
    """Files of a local folder."""
    return lambda name: path if (path := folder / name).is_file() else None


def check_files(name: str, find: Find, pickle: bool = False) -> None:
    """Refuse weight files that `whole` must not read. name: what messages call the model; pickle: it is allowed."""
    if find("adapter_config.json"):
        raise UserError(f"{name} is an adapter of another model\nmerge it into that model and save the result")
    files = _shards(name, find, pickle)
    if not files:
        raise UserError(f"{name} has no .safetensors file that transformers would read: model.safetensors\n{CONSENT}")
    for file in files:
        if not pickle and not file.endswith(".safetensors"):
            raise UserError(f"{name}: the index of its weights names {file!r}, not a .safetensors file\n{CONSENT}")
        _check_tensors(name, find(file), file)


def _shards(name: str, find: Find, pickle: bool) -> list[str]:
    """Names of the files that transformers would read, in its order of preference; [] if there are none."""
    config = find("config.json")
    named = _json(name, config).get("transformers_weights") if config else None
    stems = ["model.safetensors", "pytorch_model.bin"] if pickle else ["model.safetensors"]
    for candidate in [named] if named else [stem + end for stem in stems for end in ("", ".index.json")]:
        path = find(str(candidate))
        if path and str(candidate).endswith(".index.json"):
            table = _json(name, path).get("weight_map")
            if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
                raise UserError(f"{name}: {candidate} has no weight_map of file names")
            return sorted(set(table.values()))
        if path:
            return [str(candidate)]
    return []


def _json(name: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{name}: {path.name} cannot be read: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise UserError(f"{name}: {path.name} holds no JSON object")
    return content


def _check_tensors(name: str, path: Path | None, file: str) -> None:
    if path is None:
        raise UserError(f"{name} does not load: the index of its weights names {file!r}, and there is no such file")
    tensors = _header(path) if file.endswith(".safetensors") else _pickled(path)
    if tensors is None:
        raise UserError(f"{name} does not load: {file} is not a whole file of weights; copy or download it again")
    kind = {key: dtype for key, (dtype, shape) in tensors.items() if _is_weight(key, shape)}
    wrong = [key for key, dtype in kind.items() if dtype not in FLOATS]
    if wrong:
        raise UserError(
            f"{name}: the weights are not floating-point numbers: {listed(wrong)} of type {kind[min(wrong)]}\n"
            f"train an original that is stored as {', '.join(FLOATS)}, not a quantised copy"
        )


def _header(path: Path) -> dict[str, tuple[str, list[int]]] | None:
    """Tensor -> type and shape; None if the file is not what its header says.

    A safetensors file: 8 bytes length, a JSON header {tensor: {dtype, shape, data_offsets}}, the data.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            return None
        try:
            entries = {key: entry for key, entry in json.loads(file.read(length)).items() if key != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            tensors = {key: (str(entry["dtype"]), list(entry["shape"])) for key, entry in entries.items()}
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return None
    return tensors if size == 8 + length + end else None


def _pickled(path: Path) -> dict[str, tuple[str, list[int]]] | None:
    """The same of a file of torch.save, read without its data and without running code."""
    import torch

    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    try:
        weights = torch.load(path, map_location="meta", weights_only=True)
        return {
            key: (names.get(value.dtype, str(value.dtype)), list(value.shape))
            for key, value in weights.items()
            if torch.is_tensor(value)
        }
    except Exception:  # whatever else the file is
        return None


def _is_weight(key: str, shape: list[int]) -> bool:
    """Whether a tensor is something to train; buffers (masks, position ids) may hold whole numbers."""
    last = key.rsplit(".", 1)[-1]
    return last == "weight" or (last == "bias" and len(shape) == 1)


def whole(loader: Any, place: str, name: str, **options: Any) -> Any:
    """`loader.from_pretrained(place, **options)` with every weight from the file, all of them finite numbers."""
    with _unprinted_report():
        model, report = loader.from_pretrained(place, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    faults = []
    if report["missing_keys"]:
        faults.append(f"missing, and random if we went on: {listed(report['missing_keys'])}")
    if report["unexpected_keys"]:
        faults.append(f"unknown to {type(model).__name__}: {listed(report['unexpected_keys'])}")
    if report["mismatched_keys"]:
        key, found, wanted = min(report["mismatched_keys"])
        others = listed(entry[0] for entry in report["mismatched_keys"])
        faults.append(f"of another shape: {others}: {list(found)} in the file, {list(wanted)} by config.json")
    if faults:
        raise UserError("\n".join([f"{name}: its weights and its config.json don't belong together", *faults]))
    if wrong := not_finite(model):
        raise UserError(f"{name}: weights are NaN or infinite: {listed(wrong)}")
    return model


def not_finite(model: Any) -> list[str]:
    """Names of the weights that are NaN or infinite."""
    return [key for key, value in model.named_parameters() if not bool(value.isfinite().all())]


def listed(keys: Iterable[str]) -> str:
    """The first two of some names, and how many more there are."""
    keys = sorted(keys)
    more = f" and {len(keys) - 2} more" if len(keys) > 2 else ""
    return ", ".join(key[:120] for key in keys[:2]) + more


@contextmanager
def _unprinted_report():
    """Without transformers' table of keys on stderr: `whole` says the same in a sentence."""
    log = logging.getLogger("transformers.modeling_utils")

    def other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    log.addFilter(other)
    try:
        yield
    finally:
        log.removeFilter(other)
