"""Files and folders that are either whole or not there: written beside their place and moved into it."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpozoo.errors import UserError


def cache_folder() -> Path:
    """`$GRPOZOO_CACHE`, or `~/.cache/grpozoo`."""
    return Path(os.environ.get("GRPOZOO_CACHE") or "~/.cache/grpozoo").expanduser()


def made_once(name: str, fill: Callable[[Path], None], root: Path | None = None, again: bool = False) -> Path:
    """The folder `root/name` (root: the cache), filled by `fill(folder)` if it does not exist, or if `again`.

    `fill` writes into a temporary neighbour that is renamed when it is complete. Processes that want the same folder
    wait for the one that makes it.
    """
    from filelock import FileLock

    folder = (root or cache_folder()) / name
    if folder.is_dir() and not again:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{name}.lock"):
            if again or not folder.is_dir():
                _fill(folder, fill)
    except OSError as error:
        if not isinstance(error, PermissionError) and os.access(folder.parent, os.W_OK):
            raise
        message = f"{folder.parent} cannot be written to: {error}"
        raise UserError(f"{message}\nset GRPOZOO_CACHE to a folder that can") from None
    return folder


def _fill(folder: Path, fill: Callable[[Path], None]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fill(temporary)
        temporary.chmod(0o755)  # mkdtemp's folders are private; a shared cache is not
        old = temporary.with_name(temporary.name + ".old")
        if folder.is_dir():
            folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path | str, text: str) -> None:
    """The whole file or the old one, never half of it."""
    partial = Path(path).with_name(f".{Path(path).name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: Path | str, value: Any) -> None:
    """`write_text` of a JSON value."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
