"""From the words of a command line to the configuration that they compose."""

import hydra
from omegaconf import DictConfig

from grpozoo.compose import search_path


def compose(overrides: list[str]) -> DictConfig:
    """The configuration that the command line would compose."""
    search_path.register()
    search_path.check_choices(overrides)
    with hydra.initialize_config_dir(str(search_path.CONF), version_base="1.3"):
        return hydra.compose("config", overrides=overrides)
