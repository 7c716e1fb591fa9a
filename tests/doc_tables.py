"""The tables of docs/ that repeat what the code says: `python tests/doc_tables.py` writes them, test_docs.py compares.

A block stands between `<!-- generated: NAME ARGUMENTS -->` and `<!-- end -->`.
"""

import ast
import inspect
import re
from pathlib import Path

from grpozoo import config as core
from grpozoo import hooks, types
from grpozoo.cli import card
from grpozoo.compose.registry import installed, load_class
from grpozoo.hooks import KINDS
from grpozoo.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
POSITIVE, NOT_NEGATIVE = ("at least 1", 0), ("at least 0", -1)
ALLOWED = {  # key -> what is allowed, and a value that is not
    **dict.fromkeys(
        ["steps", "prompts_per_step", "group_size", "max_completion_length", "max_prompt_length"], POSITIVE
    ),
    **dict.fromkeys(["update.epochs", "update.activation_memory_mb", "update.logits_chunk"], POSITIVE),
    **dict.fromkeys(["checkpoint.keep", "model.layers", "model.width", "model.heads"], POSITIVE),
    **dict.fromkeys(
        ["lr", "sampling.top_k", "optim.weight_decay", "optim.max_grad_norm", "optim.warmup_steps"], NOT_NEGATIVE
    ),
    **dict.fromkeys(["eval.every", "eval.prompts", "eval.samples", "checkpoint.every"], NOT_NEGATIVE),
    "temperature": ("at least 1e-05; 0 with `group_size=1` only", 1e-6),
    "reward_timeout": ("above 0", 0),
    "sampling.top_p": ("(0, 1]", 0),
    "sampling.min_p": ("[0, 1)", 1),
    "update.mini_batches": ("1 to prompts_per_step * group_size", 129),
    "update.tokens_per_micro_batch": ("at least 1, or null", 0),
    "optim.betas": ("two numbers in [0, 1)", [0.9, 1.0]),
    "optim.eps": ("above 0", 0),
    "optim.schedule": ("constant, linear, cosine", "step"),
    "eval.ks": ("1 to eval.samples", [9]),
    "eval.temperature": ("at least 1e-05", 1e-6),
    "logger.project": ("a name without `/` and `\\`", "../x"),
    "logger.completions": ("at least -1", -2),
    "model.kind": ("tiny, smollm2", "huge"),
    "model.dtype": ("float32, bfloat16", "float16"),
}


def table(header, rows):
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def commented_fields(module):
    """Class name -> [(field, annotation, default or None, comment)] of every dataclass in a module's source."""
    source = inspect.getsource(module)
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            parts = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            found[node.name] = [
                (
                    part.target.id,
                    ast.unparse(part.annotation),
                    part.value,
                    lines[part.end_lineno - 1][part.end_col_offset :].partition("# ")[2],
                )
                for part in parts
            ]
    return found


def default_text(value):
    """How a default is written in a command."""
    match value:
        case ast.Constant(value=None):
            return "null"
        case ast.Constant(value=bool(flag)):
            return str(flag).lower()
        case ast.Attribute():
            return value.attr
        case ast.Call(keywords=[ast.keyword(value=ast.Lambda(body=body))]):
            return ast.unparse(body)
    return ast.unparse(value).strip("'\"")


def config_table(section):
    """Keys of the core: of a section, or of the top level (`top`)."""
    name = "Config" if section == "top" else section.capitalize()
    rows = []
    for field, kind, default, comment in commented_fields(core)[name]:
        key = field if section == "top" else f"{section}.{field}"
        if kind in commented_fields(core) or kind.startswith("dict"):
            continue  # a section has a table of its own
        kind = "choice" if key == "optim.schedule" else kind.replace(" | None", " or null")
        rows.append((f"`{key}`", kind, ALLOWED.get(key, ("",))[0], f"`{default_text(default)}`", comment))
    return table(("key", "type", "allowed", "default", "meaning"), rows)


def yaml_table(*names):
    """Keys of config files `GROUP/NAME`: default and comment."""
    rows = []
    for name in names:
        text = (ROOT / "conf" / f"{name}.yaml").read_text()
        prefix = "task" if name.startswith("task/") else f"plugins.{name.split('/')[1]}"
        for line in text.splitlines():
            if (match := re.fullmatch(r"\s*(\w+):\s+(\S.*?)(?:\s+#\s(.*))?", line)) and match[1] != "kind":
                value = "required" if match[2] == "???" else f"`{match[2]}`"
                rows.append((f"`{prefix}.{match[1]}`", value, match[3] or ""))
    return table(("key", "default", "meaning"), rows)


def hooks_table():
    """Every hook in loop order."""
    rows = []
    for name, kind in KINDS.items():
        function = getattr(hooks, name)
        rows.append((f"`{name}{inspect.signature(function)}`", kind, inspect.getdoc(function)))
    return table(("hook", "kind", "what it is asked for"), rows)


def needs_table():
    """What a plugin may need."""
    rows = re.findall(r'^    "(\w+)",  # (.*)$', inspect.getsource(hooks), re.MULTILINE)
    return table(("need", "what is computed"), [(f'`"{name}"`', text) for name, text in rows])


def types_table(name):
    """Fields of one of the types that flow."""
    rows = [(f"`{field}`", comment) for field, _, _, comment in commented_fields(types)[name]]
    return table((f"`{name}`", "what it holds"), rows)


def levels_table():
    """The first training problem of each level, and its worked solution."""
    from grpozoo.tasks.arithmetic import LEVELS, Arithmetic

    rows = []
    for level, family in LEVELS.items():
        task = Arithmetic(Arithmetic.Config(level=level, train=10, heldout=0))
        numbers = f"{family.min_terms}" if family.min_terms == family.terms else f"{family.min_terms} to {family.terms}"
        kind = f"{numbers} operands, `{family.operators}`" + (f", modulo {family.modulus}" if family.modulus else "")
        rows.append((level, kind, f"`{task.train[-1].text}`", f"`{task.solution(task.train[-1])}`"))
    return table(("`task.level`", "problems", "prompt", "completion"), rows)


def metrics_table():
    """Every metric of the core and of the plugins of this distribution."""
    texts = dict(METRICS)
    for name, entry in sorted(installed().items()):
        if entry.dist.name == "grpozoo":
            texts |= {f"{name}/{key}": text for key, text in load_class(name).metrics.items()}
    rows = [(f"`{name}`", *text.split(": ", 1)) for name, text in texts.items()]
    return table(("metric", "unit", "meaning (expected)"), rows)


def rooms_table():
    """Every file and folder of grpozoo/ with the first line of its docstring."""
    rows = []
    for path in sorted((ROOT / "grpozoo").iterdir(), key=lambda path: (path.is_dir(), path.name)):
        file = path / "__init__.py" if path.is_dir() else path
        if file.is_file() and file.suffix == ".py" and not path.name.startswith("__"):
            text = ast.get_docstring(ast.parse(file.read_text())).splitlines()[0]
            inside = sorted(part.stem for part in path.glob("[!_]*.py")) if path.is_dir() else []
            name = f"`{path.name}/` {', '.join(inside)}" if inside else f"`{path.name}`"
            rows.append((name, text))
    return table(("room", "what it holds"), rows)


def plugins_by_hook():
    """Every plugin of this distribution under each hook that it answers, in loop order."""
    answers = {hook: [] for hook in KINDS}
    for name, entry in sorted(installed().items()):
        if entry.dist.name == "grpozoo":
            cls = load_class(name)
            for hook in KINDS:
                if mark := getattr(getattr(cls, hook, None), "grpozoo_impl", None):
                    answers[hook].append(f"{name} (wraps)" if mark["wrapper"] else name)
    rows = [(f"`{hook}`", KINDS[hook], ", ".join(names)) for hook, names in answers.items() if names]
    return table(("hook", "kind", "plugins"), rows)


GENERATORS = {
    "rooms": rooms_table,
    "plugins": plugins_by_hook,
    "config": config_table,
    "yaml": yaml_table,
    "hooks": hooks_table,
    "needs": needs_table,
    "types": types_table,
    "levels": levels_table,
    "metrics": metrics_table,
    "methods": card.index,
    "smallest": card.smallest,
}


def filled(text):
    """The page with its generated blocks as they must be."""

    def block(match):
        name, *arguments = match[2].split()
        return match[1] + GENERATORS[name](*arguments) + match[3]

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    for page in [*sorted(DOCS.glob("*.md")), DOCS / "methods" / "README.md", ROOT / "plugins" / "README.md"]:
        page.write_text(filled(page.read_text()))
    for name in card.methods():
        (DOCS / "methods" / f"{name}.md").write_text(card.card(name))
