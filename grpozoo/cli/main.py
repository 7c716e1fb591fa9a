"""`python -m grpozoo KEY=VALUE ...` trains; `grpozoo TOOL ...` runs one of the tools around it."""

import logging
import os
import sys
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from grpozoo.cli import sweep
from grpozoo.cli.flags import FLAGS, arranged
from grpozoo.cli.messages import EXPECTED, TOOLS, explain
from grpozoo.compose import command, search_path
from grpozoo.compose.command import compose as compose  # its place of earlier, from which others take it
from grpozoo.errors import UserError

__all__ = ["FLAGS", "TOOLS", "leave", "main"]


def main() -> None:
    """Entry point of the command line."""
    arguments = sys.argv[1:]
    tool = arguments[0] if arguments and arguments[0] in TOOLS else None
    debug = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on, and we word them
    try:
        search_path.register()
        if tool:
            from grpozoo.cli import tools

            status = tools.run(tool, arguments[1:])
        else:
            words, flags = arranged(arguments)
            sys.argv[1:] = [*words, *flags]
            status = _train(words, debug)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader has seen enough: `grpozoo plugins | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except (*EXPECTED, HydraException) as error:
        if debug:
            raise
        print(explain(error), file=sys.stderr)
        status = 1
    leave(status)


def leave(status: int) -> NoReturn:
    """End the process. One of several skips the interpreter's own shutdown, as multiprocessing's children do.

    A thread of torch.distributed may still hold a tensor whose Python side it then cannot free: it aborts the process, and
    the launcher takes a run that is done and saved for a failed one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        logging.shutdown()
        os._exit(status)
    sys.exit(status)


def _train(words: list[str], debug: bool) -> int:
    """All jobs of the command (several with -m); one that fails does not stop the others."""
    command.check(words)
    if int(os.environ.get("RANK", "0")):  # the main process owns the run folder
        sys.argv += ["hydra.run.dir=."]
    statuses = []

    @hydra.main(version_base="1.3", config_path=str(search_path.CONF), config_name="config")
    def job(composed: DictConfig) -> float | None:
        """The held-out accuracy at the end, for sweepers that look for the best."""
        several = HydraConfig.get().mode is RunMode.MULTIRUN
        try:
            return _job(composed)
        except EXPECTED as error:
            if debug:
                raise
            print(explain(error), file=sys.stderr)
            if several:
                sweep.note_failure(explain(error))
                raise UserError(explain(error)) from None  # one that every launcher can hand back
            statuses.append(1)
        except Exception as error:
            if several:
                sweep.note_failure(repr(error))
            raise
        return None

    sweep.Started.folder = None
    try:
        job()
    except UserError as error:  # of a job that failed: the table names it with the others
        if str(error) not in {note["message"] for note in sweep.failures()}:
            raise
    finally:
        if failed := sweep.failures():
            print(sweep.table(failed), file=sys.stderr)
    if failed:
        return 1
    return max(statuses, default=0)


def _job(composed: DictConfig) -> float | None:
    """One run, the accuracy of a sweep's; SystemExit where a signal stopped it, which means the sweep too."""
    from grpozoo.cli.train import new_folder, run

    job = HydraConfig.get()
    words, folder = list(job.overrides.task), job.runtime.output_dir
    several = job.mode is RunMode.MULTIRUN
    if several and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "a sweep (-m) runs its jobs one after the other in one process\nstart each job with torchrun instead"
        )
    command.check(words)
    search_path.check_choices(words)
    if not several and job.run.dir == job.runtime.cwd:  # nobody said hydra.run.dir=...
        folder = new_folder()
    done = run(composed, words, folder)
    if done.status:
        raise SystemExit(done.status)
    if not several:
        return None
    sweep.remove_if_empty(folder)
    return done.accuracy
