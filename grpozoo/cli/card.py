"""`grpozoo card NAME`: what one method is, on a page made from its code: source, equations, options, needs, stacking."""

import ast
import inspect
import io
import itertools
import re
import tokenize
from collections.abc import Sequence
from enum import Enum
from typing import Any

from grpozoo.compose import search_path, stacking
from grpozoo.compose.registry import installed, load_class
from grpozoo.errors import UserError, unknown
from grpozoo.hooks import KINDS, Plugin

PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def methods() -> list[str]:
    """Our own choices that are a plugin of the same name, the defaults apart."""
    ours = {name for name, entry in installed().items() if entry.dist.name == "grpozoo"}
    choices = [name for group in (stacking.GROUP, *stacking.BESIDE) for name in search_path.choices(group)]
    return sorted(name for name in choices if name in ours and name != search_path.defaults()[stacking.group_of(name)])


def presets() -> list[str]:
    """The choices of `algo` that put several plugins together, or one with other options."""
    return [name for name in search_path.choices(stacking.GROUP) if name not in installed()]


def code_lines(cls: type) -> int:
    """Lines of a plugin's file that are code: no docstrings, comments, blank lines."""
    source = inspect.getsource(inspect.getmodule(cls))
    prose = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose |= set(range(node.lineno, node.end_lineno + 1))
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for t in tokens if t.type not in skipped for line in range(t.start[0], t.end[0] + 1)}
    return len(lines - prose)


def options(cls: type) -> list[tuple[str, str, str]]:
    """(name, default, meaning) of each option; the meaning is the comment beside it."""
    source = inspect.getsource(inspect.getmodule(cls)).splitlines()
    rows = []
    for node in ast.walk(ast.parse("\n".join(source))):
        if isinstance(node, ast.ClassDef) and node.name == "Config":
            for part in (part for part in node.body if isinstance(part, ast.AnnAssign)):
                name = part.target.id
                comment = source[part.end_lineno - 1][part.end_col_offset :].partition("# ")[2]
                rows.append((f"`{name}`", f"`{_default(cls.Config.__dataclass_fields__[name])}`", comment))
    return rows


def _default(field) -> str:
    value = field.default_factory() if callable(field.default_factory) else field.default
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else value


def hooks(cls: type) -> list[str]:
    """Hooks that a plugin answers: `name` (kind)."""
    marks = {hook: getattr(getattr(cls, hook, None), "grpozoo_impl", None) for hook in KINDS}
    return [f"`{hook}` ({KINDS[hook]}{', wrapper' if mark['wrapper'] else ''})" for hook, mark in marks.items() if mark]


def stacks(name: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The methods that a method stacks with, and the others with the reason."""
    others = [other for other in methods() if other != name]
    reasons = [(other, stacking.refusal(*sorted((name, other)))) for other in others]
    return [other for other, reason in reasons if reason is None], [pair for pair in reasons if pair[1] is not None]


def card(name: str) -> str:
    """The page of one method, Markdown."""
    if name not in installed():
        raise unknown("plugin", name, installed())
    cls = load_class(name)
    if not (inspect.isclass(cls) and issubclass(cls, Plugin)):
        raise UserError(f"{name} is not a plugin of this program")
    text = inspect.getdoc(inspect.getmodule(cls)) or inspect.getdoc(cls) or ""
    title, _, body = text.partition("\n")
    papers = ", ".join(
        f"[arXiv:{number}](https://arxiv.org/abs/{number})" for number in dict.fromkeys(PAPER.findall(text))
    )
    needs = cls(cls.Config()).needs
    parts = [
        f"# {title.rstrip('.')}\n",
        f"`{stacking.group_of(name)}={name}`, {code_lines(cls)} lines of code"
        + (f". Source: {papers}" if papers else "")
        + "\n",
        f"```text\n{body.strip(chr(10))}\n```\n" if body.strip() else "",
        "## Options\n",
        table(("option", "default", "meaning"), options(cls)) if options(cls) else "None.\n",
        f"Needs: {', '.join(f'`{need}`' for need in sorted(needs)) or 'nothing beyond the log-probabilities'} "
        "(at its defaults).  ",
        f"Answers: {', '.join(hooks(cls)) or 'no hook'}."
        + (f"  \nControls: {', '.join(sorted(cls.controls))}." if cls.controls else "")
        + (
            f"  \nPlace among wrappers of one hook: {cls.order}."
            if any("wrapper" in hook for hook in hooks(cls))
            else ""
        )
        + "\n",
    ]
    if cls.metrics:
        parts.append("## Metrics\n")
        parts.append(
            table(("metric", "unit and meaning"), [(f"`{name}/{key}`", value) for key, value in cls.metrics.items()])
        )
    if name in methods():
        good, bad = stacks(name)
        parts.append("## Stacking\n")
        parts.append(f"Stacks with {', '.join(good)}.\n" if good else "Stacks with no other method.\n")
        if bad:
            reasons: dict[str, list[str]] = {}
            for other, reason in bad:
                reasons.setdefault(
                    reason.replace(f"{other} and {name}", f"{name} and it").replace(
                        f"{name} and {other}", f"{name} and it"
                    ),
                    [],
                ).append(other)
            parts.append(table(("does not stack with", "because"), [(", ".join(o), r) for r, o in reasons.items()]))
    return "\n".join(part for part in parts if part)


def index() -> str:
    """The table of all methods and presets, Markdown."""
    rows = []
    for name in methods():
        cls = load_class(name)
        text = inspect.getdoc(inspect.getmodule(cls)) or ""
        papers = ", ".join(dict.fromkeys(PAPER.findall(text)))
        owned = ", ".join(hook.split(" ")[0] for hook in hooks(cls) if hook.split(" ")[0] not in ("`validate`",))
        shown = name if stacking.group_of(name) == stacking.GROUP else f"{stacking.group_of(name)}={name}"
        rows.append((f"[{shown}]({name}.md)", text.splitlines()[0].rstrip("."), papers, owned, code_lines(cls)))
    parts = [table(("`algo=`", "method", "arXiv", "hooks", "lines of code"), rows)]
    made_of = []
    for name in presets():
        content = stacking.content(name)
        made_of.append((name, ", ".join(f"`{plugin}`" for plugin in content), _comment(name)))
    parts.append(table(("recipe", "plugins", "what it is"), made_of))
    return "\n".join(parts)


def smallest() -> str:
    """The smallest advantage and the smallest loss, as they are: file, lines of code, text."""
    parts = []
    for hook in ("advantage", "policy_loss"):
        owners = [name for name in methods() if f"`{hook}` (one)" in hooks(load_class(name))]
        name = min(owners, key=lambda name: (code_lines(load_class(name)), name))
        cls = load_class(name)
        source = inspect.getsource(inspect.getmodule(cls))
        code = source[source.index('"""', 3) + 3 :].strip()
        parts.append(
            f"`{hook}`: plugins/{name}.py, {code_lines(cls)} lines of code below its docstring.\n\n```py\n{code}\n```\n"
        )
    return "\n".join(parts)


def _comment(name: str) -> str:
    """The first sentence of a recipe's file."""
    text = stacking.file_of(name).read_text()
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()[1:])
    return re.split(r"(?<=\w)[.:] (?=[A-Z])|[.:]$", " ".join(line.strip("# ") for line in lines))[0] + "."
