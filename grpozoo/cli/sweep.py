"""A sweep, whichever of Hydra's sweepers and launchers runs it: its jobs may run in other processes, on other machines.

A job answers its held-out accuracy (what `hydra/sweeper=optuna` maximises) or raises, and one that fails leaves
failed.json in its own folder; the command that started the sweep reads them and ends with status 1.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from grpozoo.storage import write_json

NOTE = "failed.json"


class Started(Callback):
    """Hydra calls it (`hydra.callbacks`) in the process of the command: the folder of the sweep, once its name is known."""

    folder: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **_) -> None:
        """Forget what an earlier sweep left in the same folder."""
        Started.folder = Path(config.hydra.sweep.dir).absolute()
        for note in Started.folder.rglob(NOTE):
            note.unlink()


def note_failure(message: str) -> None:
    """Called by the job that fails, where it runs."""
    job = HydraConfig.get()
    note = {"job": job.job.num, "overrides": list(job.overrides.task), "message": message}
    with suppress(OSError):  # a full disk: the job's own exception still fails the sweep
        write_json(Path(job.runtime.output_dir) / NOTE, note)


def remove_if_empty(folder: str) -> None:
    """A job's folder that Hydra made for a run that writes elsewhere."""
    with suppress(OSError):
        Path(folder).rmdir()


def failures() -> list[dict]:
    """What the failed jobs of this command's sweep have left, by number."""
    notes = Started.folder.rglob(NOTE) if Started.folder else ()
    return sorted((json.loads(note.read_text()) for note in notes), key=lambda note: int(note["job"]))


def table(failed: list[dict]) -> str:
    """Which jobs failed, and why in a line."""
    rows = [(str(note["job"]), " ".join(note["overrides"]), note["message"].splitlines()[0]) for note in failed]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {number:>{widths[0]}}  {words:<{widths[1]}}  {message}" for number, words, message in rows]
    return "\n".join([f"{len(rows)} job{'s' * (len(rows) > 1)} of the sweep failed ({Started.folder})", *lines])
