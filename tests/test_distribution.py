"""A wheel of ours and wheels of strangers, installed together in a fresh environment, away from the checkout."""

import json
import re
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest
import yaml
from commands import TINY

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow

PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "{distribution}"
version = "1.2"
[project.entry-points."grpozoo"]
{plugin} = "{package}:{cls}"
{conf}
[tool.setuptools]
packages = [{packages}]
[tool.setuptools.package-data]
"{package}.conf" = ["**/*.yaml"]
"""
CONF = '[project.entry-points."grpozoo.conf"]\n{package} = "{package}.conf"\n'
THEIRS = '''
"""Theirs: the centred reward times a factor."""

from dataclasses import dataclass

from grpozoo import Plugin, group_mean, hookimpl
from grpozoo.ops import group_equal


class Theirs(Plugin):
    """`algo=theirs`."""

    @dataclass
    class Config:
        factor: float = 2.0  # times the centred reward

    @hookimpl
    def advantage(self, rollouts, rewards):
        total, group_id = rewards.total, rollouts.group_id
        centred = self.config.factor * (total - group_mean(total, group_id)).nan_to_num(0.0)
        return centred.masked_fill(group_equal(total, group_id), 0.0)
'''


def write_distribution(folder, distribution, plugin, module, files=None, cls="Theirs"):
    """Sources of a distribution with one plugin and, if `files` are given, config files."""
    package = distribution.replace("-", "_")
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text(module)
    for path, text in (files or {}).items():
        target = folder / package / "conf" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    packages = f'"{package}"' + (f', "{package}.conf"' if files else "")
    conf = CONF.format(package=package) if files else ""
    text = PYPROJECT.format(
        distribution=distribution, plugin=plugin, package=package, cls=cls, conf=conf, packages=packages
    )
    (folder / "pyproject.toml").write_text(text)
    return folder


class Environment:
    """A virtual environment that sees the installed dependencies, but neither the checkout nor an editable install of it."""

    def __init__(self, folder):
        self.folder, self.elsewhere = folder / "venv", folder / "elsewhere"
        self.elsewhere.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.folder], check=True)
        self.python = self.folder / "bin" / "python"
        self.site = next((self.folder / "lib").glob("python*/site-packages"))
        self.dependencies = Path(sysconfig.get_paths()["purelib"])

    def link(self):
        """Dependencies one by one: a .pth naming their folder would bring the editable install along."""
        for entry in self.dependencies.iterdir():
            name = entry.name.lower()
            if "grpozoo" not in name and not name.endswith(".pth") and name != "__pycache__":
                (self.site / entry.name).symlink_to(entry)

    def install(self, source, wheels):
        """Build a wheel offline and install it here."""
        wheels.mkdir(exist_ok=True)
        build = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "-w",
            wheels,
            source,
        ]
        subprocess.run(build, check=True, cwd=wheels, capture_output=True)
        wheel = max(wheels.glob("*.whl"), key=lambda file: file.stat().st_mtime_ns)
        command = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.python,
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            wheel,
        ]
        subprocess.run(command, check=True, cwd=wheels, capture_output=True)
        return wheel

    def uninstall(self, distribution):
        """Remove a distribution again."""
        command = [sys.executable, "-m", "pip", "--python", self.python, "uninstall", "-q", "-y", distribution]
        subprocess.run(command, check=True, cwd=self.elsewhere, capture_output=True)

    def run(self, *arguments, cwd=None):
        """`python -m grpozoo ...` from another directory: (status, output, errors)."""
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.elsewhere),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [self.python, "-m", "grpozoo", *arguments]
        process = subprocess.run(
            command, cwd=cwd or self.elsewhere, env=environment, capture_output=True, text=True, timeout=300
        )
        return process.returncode, process.stdout, process.stderr.strip()


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of what belongs to our distribution, so that the build leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("sources") / "grpozoo"
    copy.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, tracked):
        if (
            name.split("/")[0] in ("grpozoo", "plugins", "conf", "pyproject.toml", "README.md", "LICENSE")
            and (ROOT / name).is_file()
        ):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


@pytest.fixture(scope="module")
def environment(tmp_path_factory, sources):
    """Ours and theirs, installed from wheels."""
    folder = tmp_path_factory.mktemp("environment")
    made = Environment(folder)
    made.link()
    made.wheel = made.install(sources, folder / "wheels")
    files = {
        "algo/theirs.yaml": "# @package plugins\ntheirs:\n  factor: 2.0\n",
        "curriculum/short.yaml": "# @package _global_\nmax_completion_length: 6\n",
    }
    made.install(write_distribution(folder / "theirs", "their-methods", "theirs", THEIRS, files), folder / "wheels")
    return made


def test_our_wheel_holds_code_configuration_and_plugins_and_runs_away_from_the_checkout(environment):
    status, out, err = environment.run("--cfg", "job")
    assert status == 0, err
    assert list(yaml.safe_load(out)["plugins"]) == ["grpo", "iid", "native", "full", "answer"]
    code = "import grpozoo, grpozoo_plugins; print(grpozoo.__file__, list(grpozoo_plugins.__path__))"
    where = subprocess.run(
        [environment.python, "-c", code], cwd=environment.elsewhere, capture_output=True, text=True, check=True
    ).stdout
    assert str(ROOT) not in where and where.count(str(environment.site)) == 2


def test_a_strangers_choice_composes_with_ours_and_a_new_group_works(environment):
    status, out, err = environment.run(
        "--cfg", "job", "algo=[theirs,grpo]", "+curriculum=short", "plugins.theirs.factor=3"
    )
    assert status == 0, err
    config = yaml.safe_load(out)
    assert config["plugins"]["theirs"] == {"factor": 3} and config["max_completion_length"] == 6
    status, _, err = environment.run("algo=thiers")
    assert status == 1 and "did you mean 'theirs'?" in err
    status, _, err = environment.run("algo=theirs", "plugins.theirs.facter=3")
    assert status == 1 and "(from their-methods 1.2) has no option 'facter', did you mean 'factor'?" in err
    _, out, _ = environment.run("--help")
    assert re.search(r"algo: .*grpo.*theirs", out) and "curriculum: short" in out


def test_a_strangers_plugin_trains_with_ours_and_the_manifest_says_whose_it_is(environment):
    status, _, err = environment.run(
        "algo=[theirs,grpo]",
        "+curriculum=short",
        "run_dir=run",
        *[key for key in TINY if not key.startswith("max_completion_length")],
    )
    assert status == 0, err
    run = environment.elsewhere / "run"
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["hooks"]["advantage"] == ["theirs"] and manifest["hooks"]["policy_loss"] == ["grpo"]
    assert manifest["plugins"]["theirs"]["distribution"] == "their-methods 1.2"
    assert yaml.safe_load((run / "config.yaml").read_text())["max_completion_length"] == 6
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_the_kit_checks_a_strangers_plugin(environment):
    status, out, err = environment.run("check", "theirs")
    assert status == 0, out + err
    assert out.startswith("theirs (their-methods 1.2) passes") and "missing rewards" in out


def test_two_distributions_with_one_plugin_name_stop_every_command_naming_both(environment, tmp_path):
    environment.install(write_distribution(tmp_path / "twin", "twin-methods", "theirs", THEIRS), tmp_path / "wheels")
    try:
        status, _, err = environment.run(*TINY)
        assert status == 1 and "Traceback" not in err
        assert re.search(
            r"(their-methods 1\.2 and twin-methods|twin-methods 1\.2 and their-methods) 1\.2 both bring a grpozoo plugin named 'theirs'",
            err,
        )
    finally:
        environment.uninstall("twin-methods")


def test_two_distributions_with_one_config_file_are_refused_naming_both(environment, tmp_path):
    files = {"algo/theirs.yaml": "# @package plugins\nother: {}\n"}
    environment.install(
        write_distribution(tmp_path / "file", "file-methods", "other", THEIRS, files), tmp_path / "wheels"
    )
    try:
        status, _, err = environment.run("--cfg", "job")
        assert status == 1 and re.search(
            r"(file-methods and their-methods|their-methods and file-methods) both bring the config file algo/theirs\.yaml",
            err,
        )
    finally:
        environment.uninstall("file-methods")


def test_a_broken_distribution_is_listed_and_stops_only_runs_that_name_it(environment, tmp_path):
    broken = textwrap.dedent('''
        """Broken."""
        raise RuntimeError("no GPU")
    ''')
    environment.install(
        write_distribution(tmp_path / "broken", "broken-methods", "broken", broken), tmp_path / "wheels"
    )
    try:
        status, out, _ = environment.run("plugins")
        assert status == 1 and re.search(
            r"broken  \(broken-methods 1\.2\)\n    BROKEN\n    plugin 'broken' .*RuntimeError\('no GPU'\)\n    at .*__init__\.py:3",
            out,
        )
        assert "theirs  (their-methods 1.2)" in out
        status, _, err = environment.run("+plugins.broken={}")
        assert (
            status == 1
            and "does not import: RuntimeError('no GPU')" in err
            and "Traceback" not in err
            and len(err.splitlines()) <= 4
        )
        assert environment.run("--cfg", "job")[0] == 0
    finally:
        environment.uninstall("broken-methods")


def test_in_the_checkout_the_installed_wheel_is_not_mixed_with_the_sources(environment, sources):
    status, out, err = environment.run("--cfg", "job", cwd=sources)
    assert status == 1 and "pip install -e " in err, out[:200] + err


def test_the_wheel_is_small_and_holds_only_what_runs(environment):
    listing = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", environment.wheel], capture_output=True, text=True, check=True
    ).stdout
    names = [line.split()[0] for line in listing.splitlines()[1:]]
    assert (
        "grpozoo/conf/config.yaml" in names and "grpozoo_plugins/grpo.py" in names and "grpozoo/testing/kit.py" in names
    )
    assert not [name for name in names if name.startswith(("tests", "experiments", "docs"))]
    assert environment.wheel.stat().st_size < 6e6
