"""Who may import whom, what imports torch, and which words the core must not know."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = sorted((ROOT / "grpozoo").rglob("*.py"))
PLUGINS = sorted((ROOT / "plugins").glob("*.py"))
CONTRACT = ("types", "hooks", "ops")
FORBIDDEN_IN_PLUGINS = ("grpozoo.loop", "grpozoo.run.run", "grpozoo.cli", "grpozoo.compose.settings", "grpozoo_plugins")
METHODS = [
    "grpo",
    "gspo",
    "gmpo",
    "sapo",
    "cispo",
    "dapo",
    "stare",
    "vpo",
    "vespo",
    "luspo",
    "rloo",
    "remax",
    "reinforce",
    "bnpo",
    "opo",
    "gdpo",
    "gpg",
    "ppo",
    "raft",
    "maxrl",
    "axpo",
    "agon",
    "scope",
    "quasimotto",
    "pope",
    "luffy",
    "dr_grpo",
    "single_layer",
    "deep_rubric",
    "two_sided",
    "dual_clip",
    "tis",
    "icepop",
    "opsm",
]


def imports(file, typing_only=False):
    """(module, whether under `if TYPE_CHECKING`) of every import statement in a file, function bodies included."""
    found = []

    def walk(node, guarded):
        for child in ast.iter_child_nodes(node):
            inside = guarded or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
            if isinstance(child, ast.Import):
                found.extend((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{file}: relative import"
                found.append((child.module, inside))
                found.extend(
                    (f"{child.module}.{alias.name}", inside) for alias in child.names if child.module == "grpozoo"
                )
            walk(child, inside)

    walk(ast.parse(file.read_text()), False)
    return found


@pytest.mark.parametrize("name", CONTRACT)
def test_the_contract_imports_only_itself_and_torch_only_for_types(name):
    for module, guarded in imports(ROOT / "grpozoo" / f"{name}.py"):
        if module.split(".")[0] == "grpozoo":
            assert module.split(".")[1] in CONTRACT
        if module.split(".")[0] == "torch":
            assert guarded


@pytest.mark.parametrize("file", PLUGINS, ids=lambda file: file.stem)
def test_a_plugin_imports_neither_another_plugin_nor_the_loop(file):
    for module, _ in imports(file):
        assert not any(module == name or module.startswith(name + ".") for name in FORBIDDEN_IN_PLUGINS), module


@pytest.mark.parametrize("file", CORE, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_core_imports_no_plugin(file):
    assert not [module for module, _ in imports(file) if module.split(".")[0] == "grpozoo_plugins"]


@pytest.mark.parametrize(
    "module", ["grpozoo", "grpozoo.cli.main", "grpozoo.hooks", "grpozoo.compose.plugins", "grpozoo.compose.search_path"]
)
def test_importing_the_surface_imports_no_torch(module):
    code = (
        f"import sys, {module}; print(sorted({{'torch', 'transformers', 'accelerate', 'datasets'}} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


@pytest.mark.parametrize("file", CORE, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_core_names_no_method(file):
    text = f"{file.stem} {file.read_text()}"
    assert not [word for word in METHODS if re.search(rf"(?<![A-Za-z]){word}(?![A-Za-z])", text, re.IGNORECASE)]


def lines(*files):
    return sum(len((ROOT / file).read_text().splitlines()) for file in files)


def test_the_contract_and_the_loop_stay_short():
    assert lines("grpozoo/hooks.py", "grpozoo/loop.py") < 400
    assert lines("plugins/grpo.py") < 120


@pytest.mark.parametrize("file", [*CORE, *PLUGINS], ids=lambda file: str(file.relative_to(ROOT)))
def test_files_stay_under_400_lines_and_start_with_a_docstring(file):
    assert len(file.read_text().splitlines()) < 400
    assert ast.get_docstring(ast.parse(file.read_text()))
