"""The training job: settings, run folder, processes, and the loop inside them."""

import json
import math
import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from grpozoo.compose import environment, resume
from grpozoo.compose.settings import Settings, fingerprint, read
from grpozoo.errors import UserError


@dataclass(frozen=True)
class Done:
    """How a run ended."""

    status: int  # 0, or 128 + signal if it was interrupted and saved
    folder: Path

    @property
    def accuracy(self) -> float:
        """Held-out, greedy, at the end; NaN where nobody can tell what is right."""
        summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        accuracy = summary["heldout_accuracy"]["end"]
        return math.nan if accuracy is None else float(accuracy)


def new_folder() -> str:
    """Where a run writes if nobody says it. It is made when the run starts, so a mistake leaves nothing behind."""
    return datetime.now().strftime("runs/%Y-%m-%d/%H-%M-%S-%f")


def train(composed: DictConfig, overrides: list[str], output_dir: str) -> int:
    """Run one job; returns the exit status."""
    return run(composed, overrides, output_dir).status


def run(composed: DictConfig, overrides: list[str], output_dir: str) -> Done:
    """Run one job."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    main = int(os.environ.get("RANK", "0")) == 0
    place = locate(composed, overrides, output_dir) if main else None
    run_dir, checkpoint, composed = agree(place) if world > 1 else place
    settings = read(composed)
    if checkpoint:
        settings.notices += resume.compare(checkpoint, settings)
    from grpozoo import models
    from grpozoo.run.tracking import check_trackers

    check_trackers(settings.config.logger.trackers)
    models.check(settings.config.model)
    if main:
        settings.manifest()  # what runs is told before it runs, and whatever of it cannot be told
        make(run_dir)
    return Done(start(settings, run_dir, checkpoint), run_dir)


def make(folder: Path) -> None:
    """The run folder, which can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise UserError(
            f"run_dir: {folder} cannot be written to: {error.strerror}\nchoose another folder with run_dir=FOLDER"
        ) from None


def locate(composed: DictConfig, overrides: list[str], output_dir: str) -> tuple[Path, Path | None, DictConfig]:
    """Run folder, checkpoint to go on from, and the configuration of the run that goes on; nothing is written."""
    from grpozoo.run.checkpoint import resolve

    said = {key: _folder(composed, key) for key in ("run_dir", "resume")}
    run_dir = Path(said["run_dir"] or output_dir).resolve()
    if not said["resume"]:
        if (run_dir / "manifest.json").exists():
            raise UserError(f"{run_dir} already holds a run\ngo on with resume={run_dir}, or choose another run_dir")
        return run_dir, None, composed
    asked, (run_dir, checkpoint) = run_dir, resolve(said["resume"], run_dir, fingerprint(composed))
    if said["run_dir"] and said["resume"] != "auto" and run_dir.resolve() != asked:
        raise UserError(
            f"resume={composed.resume} goes on in its own folder, and run_dir={composed.run_dir} is another\n"
            f"drop run_dir, or start a new run without resume"
        )
    if checkpoint:
        composed = resume.goes_on_with(composed, overrides, checkpoint)
    return run_dir, checkpoint, composed


def _folder(composed: DictConfig, key: str) -> str | None:
    """The name of a folder, which may look like a number; the schema is asked later, when its run is known."""
    value = composed.get(key)
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, str | int | float) or "\0" in str(value)
    ):
        raise UserError(f"{key} is the name of a folder, got {str(value)!r}")
    return value if value is None else str(value)


def agree(place: tuple[Path, Path | None, DictConfig] | None) -> tuple[Path, Path | None, DictConfig]:
    """What the main process has located, in every process: they would find different clocks, folders and files."""
    from accelerate.utils import broadcast_object_list

    processes()
    if place:
        run_dir, checkpoint, composed = place
        message = [
            str(run_dir),
            checkpoint and str(checkpoint),
            OmegaConf.to_yaml(OmegaConf.create(environment.recorded(composed))),
        ]
    else:
        message = [None, None, None]
    broadcast_object_list(message)
    return Path(message[0]), message[1] and Path(message[1]), OmegaConf.create(message[2])


def processes(**options):
    """accelerate's view of the processes; it joins CPU processes only when told that there is nothing else."""
    import torch
    from accelerate import Accelerator

    return Accelerator(cpu=not torch.accelerator.is_available(), **options)


def start(settings: Settings, run_dir: Path, checkpoint: Path | None) -> int:
    """Load the model and train. Everything before this line was free of torch models."""
    import torch

    from grpozoo.loop import train as loop
    from grpozoo.run.checkpoint import claim
    from grpozoo.run.run import Run

    accelerator = processes(log_with=settings.config.logger.trackers or None, project_dir=str(run_dir))
    with claim(run_dir) if accelerator.is_main_process else nullcontext():
        run = Run(settings, accelerator, run_dir, checkpoint)
        with run.interruption.heard():
            loop(run)
        stopped = run.step < settings.config.steps
        if stopped:
            words = " ".join([f"resume={run_dir}", *resume.consent_words(settings.composed)])
            run.tracker.progress.print(f"saved at step {run.step}; go on with: python -m grpozoo {words}")
        run.tracker.close()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # a launcher stops all processes when one fails: none leaves before all have saved
        torch.distributed.destroy_process_group()
    return 128 + (run.interruption.signals or [0])[0] if stopped else 0
