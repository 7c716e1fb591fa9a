"""The documentation is true: its tables are what the code says, its commands compose, its code runs, its links resolve.

A fenced block may name a file after its language (```python my_rewards.py): such files are written into one folder, in
which commands are checked; a block `pyproject.toml` announces its entry points as if it were installed. RUN_FOLDER is a
folder in which something was trained.
"""

import doctest
import importlib
import importlib.metadata
import itertools
import json
import re
import shlex
import sys
import tomllib
import types
from pathlib import Path

import doc_tables
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from reward_rows import rewards_of, rows

from grpozoo import Prompt, UserError
from grpozoo.cli import card, tools
from grpozoo.cli.main import FLAGS, TOOLS, main
from grpozoo.cli.train import train
from grpozoo.compose import registry, search_path
from grpozoo.compose.command import compose
from grpozoo.compose.plugins import activate, create
from grpozoo.compose.registry import installed, load_class
from grpozoo.compose.resume import BUT, MAY_CHANGE, ROUNDING
from grpozoo.compose.settings import read_core
from grpozoo.compose.task import load_task
from grpozoo.hooks import HOOK_VERSION, KINDS, NEEDS
from grpozoo.metrics import describe

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "docs" / "methods" / "README.md",
    ROOT / "plugins" / "README.md",
    ROOT / "README.md",
]
FENCE = re.compile(r"^```(\w*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = [
    "model.warm_start=false",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "max_completion_length=8",
    "task.level=1",
    "steps=2",
]
RUN += [
    "prompts_per_step=2",
    "group_size=2",
    "eval.prompts=4",
    "eval.samples=2",
    "eval.ks=[1,2]",
    "logger.progress=false",
]


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page):
    """(language, file name or "", content) of each fenced block."""
    return FENCE.findall(text_of(page))


def commands(page):
    """Lines of shell blocks, fenced and indented, that start our programs."""
    fenced = [line for language, _, content in blocks(page) if language == "bash" for line in content.splitlines()]
    indented = [line[4:] for line in FENCE.sub("", text_of(page)).splitlines() if line.startswith("    ")]
    starts = ("python -m grpozoo", "torchrun ", "grpozoo ")
    return [line for line in [*fenced, *indented] if line.startswith(starts)]


def entries(content):
    """The entry points that a pyproject.toml announces."""
    project = tomllib.loads(content)["project"]
    dist = types.SimpleNamespace(name=project.get("name", "theirs"), version="0.1.0", metadata={"Name": "theirs"})
    for group, names in project["entry-points"].items():
        for name, value in names.items():
            yield importlib.metadata.EntryPoint(name, value, group)._for(dist)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every named file of the documentation in one folder, the distributions among them as if installed."""
    folder, extra = tmp_path_factory.mktemp("docs"), []
    for language, name, content in itertools.chain(*map(blocks, PAGES)):
        if name == "pyproject.toml":
            extra += entries(content)
        elif name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
            if language == "python" and "/" in name:
                (folder / name).with_name("__init__.py").touch()
    ours = [
        entry
        for group in ("grpozoo", "grpozoo.tasks", "grpozoo.conf")
        for entry in importlib.metadata.entry_points(group=group)
    ]

    def found(group):
        return [entry for entry in [*ours, *extra] if entry.group == group]

    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.chdir(folder)
        patch.setattr(registry, "entry_points", found)
        patch.setattr(search_path, "entry_points", found)
        importlib.invalidate_caches()
        yield folder
    for name in set(sys.modules) - before:
        if name.startswith(("grpozoo_mine", "grpozoo_backwards")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def run_folder(folder):
    """Two steps of a tiny policy."""
    arguments = [*RUN, f"run_dir={folder / 'a_run'}"]
    assert train(compose(arguments), arguments, "unused") == 0
    return folder / "a_run"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_generated_tables_are_what_the_code_says(page):
    """If this fails: `python tests/doc_tables.py`."""
    assert text_of(page) == doc_tables.filled(text_of(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_relative_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(page))):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target.partition("#")[0]).exists(), target


def sweep(overrides):
    """The first and the last combination of a sweep."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    values = [list(o.sweep_string_iterator()) if o.is_sweep_override() else None for o in parsed]
    for pick in (0, -1):
        yield [
            f"{o.get_key_element()}={v[pick]}" if v else given
            for o, v, given in zip(parsed, values, overrides, strict=True)
        ]


accepted: set[tuple[str, ...]] = set()


def check_training(arguments):
    """The command composes; options, ranges and hooks fit. No data and no model is loaded."""
    flags = [argument for argument in arguments if argument.startswith("-")]
    assert set(flags) <= set(FLAGS)
    overrides = [argument for argument in arguments if argument not in flags and argument != "job"]
    if "--config-dir" in flags:
        place = overrides.pop(0)
        overrides.append(f"hydra.searchpath=[file://{Path(place).resolve()}]")
    for chosen in sweep(overrides) if "-m" in flags else [overrides]:
        if tuple(chosen) in accepted:  # a composition takes a tenth of a second
            continue
        accepted.add(tuple(chosen))
        composed = compose(chosen)
        config, active = read_core(composed), activate(composed.plugins)
        active.hooks.validate(config=config, active=active)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_is_one_that_the_program_accepts(page, folder):
    for line in dict.fromkeys(commands(page)):
        words = shlex.split(re.split(r"\s+# ", line)[0])
        words = words[words.index("grpozoo") + 1 :]
        try:
            if not words or words[0] not in TOOLS:
                check_training(words)
            elif words[0] in ("plugins", "check"):
                names = [word for word in words[1:] if "=" not in word]
                assert set(names) <= set(installed()), names
                check_training([word for word in words[1:] if "=" in word])
            elif words[0] == "warm-start":
                check_training(words[1:])
        except Exception as error:
            pytest.fail(f"{line}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_shown_answers_are_what_the_program_prints(page, folder, monkeypatch, capsys):
    for content in (content for language, _, content in blocks(page) if language == "console"):
        for shown in content.removeprefix("$ ").split("\n$ "):
            line, _, expected = shown.partition("\n")
            words = shlex.split(line)
            monkeypatch.setattr("sys.argv", words[words.index("grpozoo") :])
            monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
            with pytest.raises(SystemExit) as stop:
                main()
            out, err = capsys.readouterr()
            assert doctest.OutputChecker().check_output(
                expected.strip() + "\n", out + err.strip() + "\n", doctest.ELLIPSIS
            ), (line, out + err)
            assert stop.value.code == (1 if err else 0)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run(page, folder, run_folder, monkeypatch):
    module = types.ModuleType("documented")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for language, name, content in blocks(page):
        if language == "python" and not name:
            exec(compile(content.replace("RUN_FOLDER", str(run_folder)), str(page), "exec"), vars(module))


def test_the_plugins_of_the_hooks_page_pass_the_tests_of_the_hooks_page(folder):
    tests = importlib.import_module("test_mine")
    (marks,) = tests.test_conformance.pytestmark
    for name in marks.args[1]:
        tests.test_conformance(name)
    tests.test_advantages_of_the_worked_example()
    tests.test_the_scale_multiplies_the_loss()
    ours = {name for name, entry in installed().items() if entry.dist.name == "grpozoo-mine"}
    assert set(marks.args[1]) == ours
    sys.modules.pop("test_mine")


def test_the_plugin_of_the_readme_is_that_of_the_hooks_page_but_for_its_check_of_the_range(folder):
    """So the conformance kit has run over it."""
    readme = next((content for language, _, content in blocks(ROOT / "README.md") if "class Centred" in content), None)
    assert readme is not None, "README.md shows the plugin Centred"
    page = (folder / "grpozoo_mine" / "centred.py").read_text()
    for line in readme.split("@hookimpl")[1].splitlines():
        assert line.split("  #")[0] in page


def test_the_hooks_page_has_every_hook_in_its_picture_and_the_version():
    page = text_of(ROOT / "docs" / "hooks.md")
    picture = next(content for language, _, content in blocks(ROOT / "docs" / "hooks.md") if not language)
    assert [hook for hook in KINDS if not re.search(rf"\b{hook}\b", picture)] == []
    assert [need for need in NEEDS if f'"{need}"' not in page] == []
    assert f"`grpozoo.HOOK_VERSION` is {HOOK_VERSION}." in page
    assert {kind for kind in KINDS.values() if not re.search(rf"^\| (\w+, )?{kind}\b", page, re.MULTILINE)} == set()


def test_there_is_no_card_without_a_method():
    files = {file.stem for file in (ROOT / "docs" / "methods").glob("*.md")} - {"README"}
    assert files == set(card.methods())


def test_the_smallest_methods_are_as_small_as_promised():
    sizes = {name: (card.code_lines(load_class(name)), card.hooks(load_class(name))) for name in card.methods()}
    assert min(lines for lines, hooks in sizes.values() if "`advantage` (one)" in hooks) <= 15
    assert min(lines for lines, hooks in sizes.values() if "`policy_loss` (one)" in hooks) <= 25


@pytest.mark.parametrize("key", doc_tables.ALLOWED)
def test_values_outside_the_documented_range_are_refused(key, composed):
    changed = composed.copy()
    OmegaConf.update(changed, key, doc_tables.ALLOWED[key][1])
    with pytest.raises(UserError, match=re.escape(key.split(".")[-1])):
        read_core(changed)


@pytest.fixture(scope="module")
def composed():
    return compose([])


def test_the_groups_of_the_configuration_page_are_those_of_the_program():
    page = text_of(ROOT / "docs" / "configuration.md")
    cells = " ".join(re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| .* \| .* \|$", page, re.MULTILINE))
    assert set(search_path.groups()) <= set(re.findall(r"`(\w+)`", cells))


def test_the_keys_that_may_change_on_resume_are_documented():
    page = text_of(ROOT / "docs" / "runs.md")
    item = r"^- May change{}(.*?)^- "
    (keys,), (rounding,) = (re.findall(item.format(kind), page, re.M | re.S) for kind in (", because", " too, at"))
    more = {"steps", "optim.schedule", "constant", "hf", "task.path", "task.heldout_path"}
    assert set(re.findall(r"`([\w.]+?)(?:\.\*)?`", keys)) == MAY_CHANGE | BUT | more
    assert set(re.findall(r"`([\w.]+)`", rounding)) == ROUNDING


def test_a_run_leaves_what_the_page_on_runs_says(run_folder):
    page = text_of(ROOT / "docs" / "runs.md")
    listed = {
        name.replace("step-00000020", "step-00000002").strip("/")
        for name in re.findall(r"^\| `([\w./-]+)` \|", page, re.MULTILINE)
    }
    top = {name for name in listed if name not in ("trainer.pt", "checksums.json")}
    assert [name for name in top if not (run_folder / name).exists()] == []
    assert {entry.name for entry in run_folder.iterdir() if entry.name[0] != "."} == {
        name.split("/")[0] for name in top
    }
    checkpoint = run_folder / "checkpoints" / "step-00000002"
    parts = {"model", "config.yaml", "manifest.json", "trainer.pt", "checksums.json"}
    assert {entry.name for entry in checkpoint.iterdir()} == parts <= listed
    row = json.loads((run_folder / "completions.jsonl").read_text().splitlines()[0])
    (sentence,) = re.findall(r"^A line of `completions.jsonl` has (.*?)\. `null`", page, re.MULTILINE | re.DOTALL)
    assert set(row) == set(re.findall(r"[a-z_]+", re.sub(r"\(.*?\)", "", sentence, flags=re.DOTALL))) - {"and"}
    assert [
        name
        for name in json.loads((run_folder / "summary.json").read_text())
        if name != "model" and f"`{name}`" not in page
    ] == []


def test_every_metric_of_a_run_is_described(run_folder):
    classes = tools.classes_of(installed())
    names = {name for line in (run_folder / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert [name for name in names if describe(name, classes) is None] == []


def test_the_functions_of_the_rewards_page_are_rewards(folder):
    prompt = Prompt("p", text="12+35=", answer="47", extra={"steps": [{"lhs": "12+35", "rhs": "47"}]})
    step = rows(["12+35=47#47", ""], lengths=[12, 16], prompts=[prompt, prompt])
    found = {}
    for name in ("score", "steps", "both", "judged"):
        function = create("function", {"path": f"{folder / 'my_rewards.py'}:{name}"})
        components = rewards_of({"function": function}, step).components
        found |= {f"{name} {key}": values.nan_to_num(-1).tolist() for key, values in components.items()}
    assert found == {
        "score function": [1, 0], "steps function": [1, 0], "judged function": [1, -1],
        "both function/right": [1, 0], "both function/short": [1 - 12 / 64, 1 - 16 / 64],
    }  # fmt: skip


def test_the_tasks_of_the_tasks_page_load(folder):
    assert [prompt.answer for prompt in load_task({"kind": "jsonl", "path": "my.jsonl", "heldout": 0}).train] == [
        "47",
        "50",
    ]
    task = load_task(compose(["task=backwards", "task.letters=3"]).task)
    assert len(task.train) + len(task.heldout) == 6**3
    assert not {prompt.id for prompt in task.train} & {prompt.id for prompt in task.heldout}
    assert task.verify(task.train[0], task.solution(task.train[0])) == 1 and task.verify(task.train[0], "") == 0
