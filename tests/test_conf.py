"""The shipped configuration: every group file composes, says the truth, and is where Hydra finds it."""

from dataclasses import fields

import pytest
from omegaconf import OmegaConf

from grpozoo.compose.command import compose
from grpozoo.compose.registry import installed, load_class
from grpozoo.compose.search_path import CONF
from grpozoo.compose.settings import read_core
from grpozoo.config import Config
from grpozoo.testing.options import config_files

FILES = sorted(CONF.rglob("*/*.yaml"))
PLUGIN_FILES = [file for file in FILES if file.read_text().startswith("# @package plugins\n")]
OWN = [name for name, entry in installed().items() if entry.dist.name == "grpozoo"]


def name_of(file):
    return f"{file.parent.relative_to(CONF)}={file.stem}"


@pytest.mark.parametrize("file", [file for file in FILES if file.parent.name != "experiment"], ids=name_of)
def test_every_choice_composes_and_its_core_keys_are_valid(file):
    config = read_core(compose([name_of(file)]))
    assert config.steps >= 1 and config.plugins


def test_no_config_file_has_the_ending_that_hydra_ignores():
    assert not list(CONF.rglob("*.yml"))


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_package_line_is_the_first_line_or_nowhere(file):
    rest = file.read_text().splitlines()[1:]
    assert not [line for line in rest if line.startswith("# @package")]  # Hydra would ignore it


@pytest.mark.parametrize("name", OWN)
def test_every_plugin_of_ours_has_a_file_that_shows_all_its_options(name):
    files = config_files(name)
    assert files, "style: one config group entry = one plugin = one file"
    written = OmegaConf.to_container(OmegaConf.load(files[0]))[name] or {}
    assert set(written) == {field.name for field in fields(load_class(name).Config)}


@pytest.mark.parametrize("name", OWN)
def test_entry_point_module_and_config_file_have_one_name(name):
    assert installed()[name].value.startswith(f"grpozoo_plugins.{name}:")
    assert any(file.stem == name for file in PLUGIN_FILES)


def test_the_composed_defaults_are_the_dataclasses_defaults():
    written = OmegaConf.to_container(compose([]), resolve=True)
    defaults = OmegaConf.to_container(OmegaConf.structured(Config), enum_to_str=True)
    for key, value in defaults.items():
        if key not in ("task", "plugins"):
            assert written[key] == value, key
    assert set(written) == set(defaults)
