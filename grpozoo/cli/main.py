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
from omegaconf.errors import OmegaConfBaseException

from grpozoo.cli.messages import TOOLS, explain
from grpozoo.compose import search_path
from grpozoo.errors import UserError, nearest

FLAGS = (
    "--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--resolve", "--package", "-p", "--run", "-r", "--multirun", "-m",
    "--shell-completion", "-sc", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--experimental-rerun",
    "--info", "-i",
)  # fmt: skip


def main() -> None:
    """Entry point of the command line."""
    arguments = sys.argv[1:]
    tool = arguments[0] if arguments and arguments[0] in TOOLS else None
    debug = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on, and we word them
    try:
        search_path.register()
        if tool is None:
            _check_flags(arguments)
        if tool:
            from grpozoo.cli import tools

            status = tools.run(tool, arguments[1:])
        else:
            status = _train(debug)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader has seen enough: `grpozoo plugins | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except (UserError, HydraException, OmegaConfBaseException) as error:
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


def _train(debug: bool) -> int:
    """All jobs of the command (several with -m); one that fails does not stop the others."""
    if int(os.environ.get("RANK", "0")):  # the main process owns the run folder
        sys.argv += ["hydra.run.dir=."]
    codes = []

    @hydra.main(version_base="1.3", config_path=str(search_path.CONF), config_name="config")
    def job(composed: DictConfig) -> None:
        from grpozoo.cli.train import train

        hydra_config = HydraConfig.get()
        try:
            if hydra_config.mode is RunMode.MULTIRUN and int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise UserError(
                    "a sweep (-m) runs its jobs one after the other in one process\nstart each job with torchrun instead"
                )
            search_path.check_choices(list(hydra_config.overrides.task))
            codes.append(train(composed, list(hydra_config.overrides.task), hydra_config.runtime.output_dir))
            if codes[-1] > 128:  # stopped by a signal, which means the sweep too
                raise SystemExit(codes[-1])
        except (UserError, OmegaConfBaseException) as error:
            if debug:
                raise
            print(explain(error), file=sys.stderr)
            codes.append(1)

    job()
    return max(codes, default=0)


def _check_flags(arguments: list[str]) -> None:
    """Hydra's own flags only; its parser would answer a misspelt one with a page of them."""
    for argument in arguments:
        flag = argument.split("=")[0]
        if flag.startswith("-") and flag not in FLAGS:
            raise UserError(
                f"unknown flag {flag}{nearest(flag, FLAGS)}\nflags: --help, --cfg job, -m (several runs); everything else is KEY=VALUE"
            )
