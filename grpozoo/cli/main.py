"""`python -m grpozoo KEY=VALUE ...` trains; `grpozoo TOOL ...` runs one of the tools around it."""

import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpozoo import search_path
from grpozoo.errors import UserError, nearest

TOOLS = {
    "warm-start": "train the starting weights of the tiny policy: grpozoo warm-start task=arithmetic task.level=3",
    "plugins": "list the installed plugins, broken ones with their error",
    "explain": "explain metrics | explain RUN_FOLDER",
    "check": "run the conformance kit over a plugin: grpozoo check NAME [CONFIG_CHOICE]",
}


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
            status = _train()
    except KeyboardInterrupt:
        status = 130
    except (UserError, HydraException, OmegaConfBaseException) as error:
        if debug:
            raise
        print(explain(error), file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.exit(status)


def _train() -> int:
    if int(os.environ.get("RANK", "0")):  # the main process owns the run folder
        sys.argv += ["hydra.run.dir=."]
    codes = []

    @hydra.main(version_base="1.3", config_path=str(search_path.CONF), config_name="config")
    def job(composed: DictConfig) -> None:
        from grpozoo.cli.train import train

        codes.append(train(composed, list(HydraConfig.get().overrides.task), HydraConfig.get().runtime.output_dir))

    job()
    return max(codes, default=0)


def compose(overrides: list[str]) -> DictConfig:
    """The configuration that the command line would compose."""
    search_path.register()
    with hydra.initialize_config_dir(str(search_path.CONF), version_base="1.3"):
        return hydra.compose("config", overrides=overrides)


def explain(error: Exception) -> str:
    """One short message: what was wrong, the nearest valid name, what to do."""
    text = str(error).strip()
    if isinstance(error, UserError):
        return text
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        available = search_path.choices(group)
        if available:
            return f"unknown choice {group}={choice}{nearest(choice, available)}\navailable: {', '.join(available)}"
    if isinstance(error, OverrideParseException):
        return f"cannot read the argument {error.override!r}\nwrite KEY=VALUE, with quotes around values that hold spaces or commas"
    key = _unknown_key(error)
    if key:
        keys = _all_keys()
        return (
            f"unknown key {key!r}{nearest(key, keys)}\n"
            f"python -m grpozoo --cfg job shows every key; groups: {', '.join(search_path.groups())}"
        )
    return "\n".join(line for line in text.splitlines()[:4])


def _unknown_key(error: Exception) -> str | None:
    """The key of an override that fits nothing."""
    marks = ("Could not override '", "Could not delete from config. '", "Key '")
    for line in str(error).splitlines():
        for mark in marks:
            if line.startswith(mark):
                return line[len(mark) :].split("'")[0]
    return None


def _all_keys() -> list[str]:
    flat: list[str] = search_path.groups()

    def walk(prefix: str, value) -> None:
        flat.append(prefix)
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}.{key}", item)

    for key, value in OmegaConf.to_container(compose([])).items():
        walk(str(key), value)
    return flat
