"""`python -m grpozoo KEY=VALUE ...` trains; `grpozoo TOOL ...` runs one of the tools around it."""

import logging
import os
import sys
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpozoo import search_path
from grpozoo.errors import UserError, nearest
from grpozoo.plugins import owner

TOOLS = {
    "warm-start": "train the starting weights of the tiny policy: grpozoo warm-start task=arithmetic task.level=3",
    "plugins": "list the installed plugins, broken ones with their error",
    "explain": "explain metrics | explain RUN_FOLDER | explain KEY=VALUE ...",
    "card": "what one method is: source, equations, options, needs, what it stacks with: grpozoo card NAME",
    "layer-scan": "train full and each layer alone, and compare: grpozoo layer-scan --seeds 0,1,2 steps=50",
    "check": "run the conformance kit over a plugin: grpozoo check NAME [CONFIG_CHOICE]",
}
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


def compose(overrides: list[str]) -> DictConfig:
    """The configuration that the command line would compose."""
    search_path.register()
    search_path.check_choices(overrides)
    with hydra.initialize_config_dir(str(search_path.CONF), version_base="1.3"):
        return hydra.compose("config", overrides=overrides)


def explain(error: Exception) -> str:
    """One short message: what was wrong, the nearest valid name, what to do."""
    text = str(error).strip()
    if isinstance(error, UserError):
        return text
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        available = search_path.choices(group) or sorted(error.options or ())
        if available:
            return f"unknown choice {group}={choice}{nearest(choice, available)}\navailable: {', '.join(available)}"
    if isinstance(error, OverrideParseException):
        tools = "" if "=" in error.override else f"{nearest(error.override, TOOLS)}\ntools: {', '.join(TOOLS)}"
        return f"cannot read the argument {error.override!r}{tools}\nwrite KEY=VALUE, with quotes around values that hold spaces or commas"
    if "appears more than once in the final defaults list" in text:
        group = text.split()[0]
        return f"{group} is chosen already: write {group}=[a,b] for several, without +"
    key = _unknown_key(error)
    return _explain_key(key) if key else "\n".join(line.strip() for line in text.splitlines()[:4] if line.strip())


def _unknown_key(error: Exception) -> str | None:
    """The key of an override that fits nothing."""
    marks = (
        "Could not override '",
        "Could not delete from config. '",
        "Could not append to config. An item is already at '",
        "Key '",
    )
    for line in str(error).splitlines():
        for mark in marks:
            if line.startswith(mark):
                return line[len(mark) :].split("'")[0]
    return None


def _explain_key(key: str) -> str:
    keys = _all_keys()
    if key in keys and key not in search_path.groups():
        return f"{key} is there already: change it without + (python -m grpozoo {key}=VALUE)"
    section, _, option = key.removeprefix("plugins.").partition(".")
    options = [name.removeprefix(f"plugins.{section}.") for name in keys if name.startswith(f"plugins.{section}.")]
    if key.startswith("plugins.") and option and f"plugins.{section}" in keys:
        return (
            f"unknown key {key!r}: the plugin {section!r} (from {owner(section)}) has no option {option!r}{nearest(option, options)}\n"
            f"options: {', '.join(options) or 'none'}"
        )
    return (
        f"unknown key {key!r}{nearest(key, keys)}\n"
        f"python -m grpozoo --cfg job shows every key; groups: {', '.join(search_path.groups())}"
    )


def _all_keys() -> list[str]:
    """Groups and keys of the configuration that the command line chose, as far as it composes."""
    groups = search_path.groups()
    chosen = [argument for argument in sys.argv[1:] if argument.lstrip("+~").split("=")[0] in groups]
    flat: list[str] = groups

    def walk(prefix: str, value) -> None:
        flat.append(prefix)
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}.{key}", item)

    try:
        composed = compose(chosen)
    except HydraException:
        composed = compose([])
    for key, value in OmegaConf.to_container(composed).items():
        walk(str(key), value)
    return flat


def _check_flags(arguments: list[str]) -> None:
    """Hydra's own flags only; its parser would answer a misspelt one with a page of them."""
    for argument in arguments:
        flag = argument.split("=")[0]
        if flag.startswith("-") and flag not in FLAGS:
            raise UserError(
                f"unknown flag {flag}{nearest(flag, FLAGS)}\nflags: --help, --cfg job, -m (several runs); everything else is KEY=VALUE"
            )
