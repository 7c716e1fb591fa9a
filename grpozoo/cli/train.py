"""The training job: settings, run folder, processes, and the loop inside them."""

import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from grpozoo.errors import UserError
from grpozoo.settings import FREE, Settings, check_resumable, fingerprint, read


def train(composed: DictConfig, overrides: list[str], output_dir: str) -> int:
    """Run one job; returns the exit status: 0, or 128 + signal if it was interrupted and saved."""
    from grpozoo.checkpoint import resolve

    rank = int(os.environ.get("RANK", "0"))
    run_dir = Path(composed.run_dir or output_dir).resolve()
    checkpoint = None
    if composed.resume:
        run_dir, checkpoint = resolve(composed.resume, run_dir, fingerprint(composed))
        if checkpoint:
            composed = saved_configuration(composed, overrides, run_dir)
    elif rank == 0 and (run_dir / "manifest.json").exists():
        raise UserError(f"{run_dir} already holds a run\ngo on with resume={run_dir}, or choose another run_dir")
    settings = read(composed)
    from grpozoo import models
    from grpozoo.tracking import check_trackers

    check_trackers(settings.config.logger.trackers)
    models.check(settings.config.model)
    if rank == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
    return start(settings, run_dir, checkpoint)


def saved_configuration(composed: DictConfig, overrides: list[str], run_dir: Path) -> DictConfig:
    """`resume=FOLDER` alone goes on with the run's own configuration; with other overrides both must agree."""
    saved = OmegaConf.load(run_dir / "config.yaml")
    free = [override for override in overrides if override.lstrip("+~").split("=")[0].split(".")[0] in (*FREE, "steps")]
    if len(free) < len(overrides):
        check_resumable(saved, composed)
        return composed
    with open_dict(saved):
        for key in (override.split("=")[0] for override in free):
            OmegaConf.update(saved, key, OmegaConf.select(composed, key))
    check_resumable(OmegaConf.load(run_dir / "config.yaml"), saved)
    return saved


def start(settings: Settings, run_dir: Path, checkpoint: Path | None) -> int:
    """Load the model and train. Everything before this line was free of torch models."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list

    from grpozoo.loop import train as loop
    from grpozoo.run import Run

    only_cpu = not torch.accelerator.is_available()  # accelerate joins CPU processes only when told so
    accelerator = Accelerator(cpu=only_cpu, log_with=settings.config.logger.trackers or None, project_dir=str(run_dir))
    if accelerator.num_processes > 1:
        where = [str(run_dir), checkpoint and str(checkpoint)]
        broadcast_object_list(where)
        run_dir, checkpoint = Path(where[0]), where[1] and Path(where[1])
    run = Run(settings, accelerator, run_dir, checkpoint)
    with run.interruptible():
        loop(run)
    stopped = run.step < settings.config.steps
    if stopped:
        run.tracker.progress.print(f"saved at step {run.step}; go on with: python -m grpozoo resume={run_dir}")
    run.tracker.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 128 + (run.signals or [0])[0] if stopped else 0
