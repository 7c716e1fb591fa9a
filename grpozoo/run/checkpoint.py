"""The checkpoint store: a checkpoint is either complete or not there, and a damaged one is noticed.

    checkpoints/.partial-step-00000020   written and synced first, then its checksums.json, then renamed to
    checkpoints/step-00000020            the name that counts; only now are older ones removed

A kill at any moment leaves the previous checkpoints and at most a hidden leftover, which the next save removes.
checksums.json holds the size and SHA-256 of every file, and
    format     how the checkpoint is written; a newer grpozoo's is refused by its number
    sequence   the order of saving: a run that went back to an earlier step has newer checkpoints with smaller steps
    saved      the time, in seconds since 1970: copying a run changes the times of its files
    score      the held-out accuracy, or null where that step was not evaluated
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from math import inf, isfinite
from pathlib import Path
from typing import Any, TextIO

from grpozoo.errors import UserError, nearest

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

FORMAT = 2  # of what is saved; 1: without a number, plugins' states of plain values only
CHECKSUMS = "checksums.json"
NAME = re.compile(r"step-(\d+)(?:-\d+)?")  # step-00000020, and step-00000020-2 when that step is saved again
LEFTOVERS = (".partial-", ".removed-")


def warn(message: str) -> None:
    """One line on standard error."""
    print(message, file=sys.stderr, flush=True)


class Store:
    """The checkpoints of one run. One process writes; any may read."""

    def __init__(self, folder: Path | str, keep: int = 2):
        self.folder = Path(folder)
        self.keep = keep  # newest checkpoints kept, besides the one with the best score

    def save(self, step: int, writer: Callable[[Path], None], score: float | None = None) -> Path:
        """Call `writer` with an empty folder to fill, and make it the newest checkpoint. It is on disk on return."""
        self.clean()
        self.folder.mkdir(parents=True, exist_ok=True)
        saved = self.checkpoints()
        target = self._free_name(step)
        partial = self.folder / f".partial-{target.name}"
        partial.mkdir()
        try:
            writer(partial)
            sequence = 1 + max((n for n in map(_sequence, saved) if n < inf), default=0)
            _seal(partial, format=FORMAT, sequence=sequence, saved=time.time(), score=score)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _sync(self.folder)
        whole = [path for path in saved if verify(path, hashes=False) is None]
        kept = {*whole[: self.keep - 1], best([target, *whole])}
        for path in saved:
            if path not in kept:
                self._remove(path)
        return target

    def checkpoints(self) -> list[Path]:
        """All that carry a checkpoint's name, complete or damaged, newest first."""
        found = [path for path in self.folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=lambda path: (_sequence(path), step_of(path)), reverse=True)

    def latest(self, log: Callable[[str], None] = warn) -> Path | None:
        """The newest checkpoint whose files are what was saved; each damaged one is reported and passed over."""
        for path in self.checkpoints():
            fault = verify(path)
            if fault is None:
                return path
            log(f"checkpoint {path} is damaged: {fault}; trying the previous one")
        return None

    def clean(self) -> None:
        """Remove what a killed save or removal left behind."""
        for path in self.folder.glob(".*"):
            if path.name.startswith(LEFTOVERS):
                shutil.rmtree(path, ignore_errors=True)

    def _free_name(self, step: int) -> Path:
        names = [f"step-{step:08d}", *(f"step-{step:08d}-{again}" for again in range(2, 1000))]
        return next(self.folder / name for name in names if not (self.folder / name).exists())

    def _remove(self, path: Path) -> None:
        removed = path.with_name(f".removed-{path.name}")
        path.rename(removed)  # a half-removed folder must not look like a damaged checkpoint
        shutil.rmtree(removed, ignore_errors=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1 for another name."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def best(paths: list[Path]) -> Path | None:
    """The one with the highest score, of equal ones the first; None if none has a score."""
    scores = {path: _note(path, "score") for path in paths}
    scored = [path for path, score in scores.items() if isinstance(score, int | float) and isfinite(score)]
    return max(scored, key=scores.__getitem__, default=None)


def verify(path: Path, hashes: bool = True) -> str | None:
    """None for a checkpoint whose files are what was saved (without hashes: in size), else what is wrong with which."""
    try:
        expected = json.loads((path / CHECKSUMS).read_text())["files"]
        for name, entry in expected.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, {entry['bytes']} were saved"
            if hashes and _digest(file) != entry["sha256"]:
                return f"{name} is not what was saved (its SHA-256 differs)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{CHECKSUMS} or a file that it names does not read ({error!r})"
    return None


def checked(path: Path | str) -> Path:
    """A checkpoint that was asked for by name: itself if complete, else UserError."""
    if fault := verify(Path(path)):
        raise UserError(f"resume: checkpoint {path} is damaged: {fault}\nresume=RUN_FOLDER takes the newest whole one")
    return Path(path)


def claim(run_dir: Path | str) -> TextIO:
    """Keep a second process out of a run folder while the returned file is open (a kill opens the folder again)."""
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    lock = open(Path(run_dir, ".lock"), "w")  # noqa: SIM115 - held open on purpose
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            message = f"{run_dir} belongs to a run that is still going\nwait for its end, or choose another run_dir"
            raise UserError(message) from None
        except OSError:
            pass  # a file system without locks
    return lock


def resolve(
    resume: str | None, run_dir: Path | str, config_hash: str, log: Callable[[str], None] = warn
) -> tuple[Path, Path | None]:
    """Where a run writes and the checkpoint that it goes on from: (run folder, checkpoint or None to start anew).

    None   (run_dir, None)
    auto   run_dir if it has a complete checkpoint; else the newest unfinished run with the same configuration in the
           same tree of runs (manifest.json: config_hash, finished); else a new run
    PATH   a run folder (its newest complete checkpoint) or a checkpoint folder; the run goes on in its own folder
    """
    run_dir = Path(run_dir)
    if resume is None:
        return run_dir, None
    if resume == "auto":
        folder, checkpoint = _automatic(run_dir, config_hash, log)
    else:
        folder, checkpoint = _named(resume, run_dir, log)
    if checkpoint:
        _check_format(checkpoint)
    return folder, checkpoint


def _named(resume: str, run_dir: Path, log: Callable[[str], None]) -> tuple[Path, Path]:
    try:
        path = Path(resume).expanduser()
        there = path.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long, a ~USER that nobody is
        raise UserError(f"resume={resume[:200]} is no path: {error}") from None
    if not there:
        where = f"resume: there is no folder {path}{_sibling(path)}"
        raise UserError(f"{where}\nresume is auto, a run folder or one of its checkpoints")
    if path.name == "checkpoints":
        path = path.parent
    if (path / "checkpoints").is_dir():
        newest = Store(path / "checkpoints").latest(log)
        if newest is None:
            raise UserError(f"resume: {path} has no complete checkpoint\nstart anew without resume")
        return path, newest
    if (path / CHECKSUMS).is_file() or NAME.fullmatch(path.name):
        folder = path.absolute().parent
        return (folder.parent if folder.name == "checkpoints" else run_dir), checked(path)
    raise UserError(f"resume: {path} is neither a run folder (with checkpoints/) nor a checkpoint (with {CHECKSUMS})")


def _check_format(checkpoint: Path) -> None:
    written = _note(checkpoint, "format") or 1
    if not isinstance(written, int) or written > FORMAT:
        raise UserError(
            f"resume: {checkpoint} was saved by a newer grpozoo (checkpoint format {written}; this one reads 1 to {FORMAT})\n"
            "go on with that version, or train on from its weights in a new run with model.path"
        )


def _automatic(run_dir: Path, config_hash: str, log: Callable[[str], None]) -> tuple[Path, Path | None]:
    newest = Store(run_dir / "checkpoints").latest(log)
    if newest is not None:
        if _manifest(run_dir).get("config_hash", config_hash) != config_hash:
            raise UserError(
                f"resume=auto: {run_dir} was started with another configuration\n"
                f"resume={run_dir} goes on if only such keys differ as may change; another run_dir starts anew"
            )
        return run_dir, newest
    candidates = []
    for manifest in _manifests(run_dir):
        content = _manifest(manifest.parent)
        if content.get("config_hash") == config_hash and content.get("finished") is not True:
            times = [
                _saved(path) for path in manifest.parent.glob("checkpoints/step-*") if (path / CHECKSUMS).is_file()
            ]
            candidates += [(max(times), manifest.parent)] if times else []
    for _, folder in sorted(candidates, reverse=True):
        if newest := Store(folder / "checkpoints").latest(log):
            return folder, newest
    return run_dir, None


def _manifests(run_dir: Path) -> list[Path]:
    """Manifests of the runs in the same tree: below the folder `runs` above run_dir, or else beside run_dir."""
    root = next((parent for parent in run_dir.absolute().parents if parent.name == "runs"), run_dir.absolute().parent)
    found = [path for depth in ("*", "*/*", "*/*/*") for path in root.glob(f"{depth}/manifest.json")]
    return [path for path in found if path.parent != run_dir.absolute() and not NAME.fullmatch(path.parent.name)]


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return {}  # killed before it was written: no run to go on from
    return content if isinstance(content, dict) else {}


def _sibling(path: Path) -> str:
    parent = path.absolute().parent
    names = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    return nearest(path.name, names)


def _seal(folder: Path, **notes: float | None) -> None:
    """Sync every file, then write the list of what they hold: its presence says that the rest is complete."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {}
    for file in files:
        _sync(file)
        entries[file.relative_to(folder).as_posix()] = {"bytes": file.stat().st_size, "sha256": _digest(file)}
    (folder / CHECKSUMS).write_text(json.dumps({**notes, "files": entries}, indent=1))
    _sync(folder / CHECKSUMS)
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _sync(path)


def _note(path: Path, name: str) -> Any:
    """What was noted of a checkpoint when it was sealed; None if it does not read or is not there."""
    try:
        return json.loads((path / CHECKSUMS).read_text())[name]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _sequence(path: Path) -> float:
    """Order of saving. Infinite where it does not read: it may be the newest, and so is looked at and reported."""
    number = _note(path, "sequence")
    return number if isinstance(number, int) else inf


def _saved(path: Path) -> float:
    """When a checkpoint was saved, seconds; earlier versions left that to the file system."""
    moment = _note(path, "saved")
    return moment if isinstance(moment, int | float) else (path / CHECKSUMS).stat().st_mtime


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Onto the disk, a file or a folder; Windows has no such call for what was opened to read."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
