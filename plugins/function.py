"""A function of the user's: `reward=function plugins.function.path=my_rewards.py:score`.

    r_i = score(what it names in its signature)

Called once per completion if its parameters are among
    prompt, completion (or text), answer, messages, extra, length, finish_reason
and once per step, returning a list (or a dict of lists, one component each), if they are among
    prompts, completions (or texts), answers, extras, lengths, finish_reasons, rollouts
`async def` works in both forms; all calls of a step then run together. `**kwargs` gets everything of the chosen form.
`prompt` is the plain text or the last user message, `messages` the chat (None for plain prompts), `completion` the
text without special tokens, `length` a number of tokens, `finish_reason` "stop" or "length".
"""

import asyncio
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from grpozoo import Plugin, UserError, hookimpl
from grpozoo.errors import nearest, unknown

ROW = ("prompt", "completion", "text", "answer", "messages", "extra", "length", "finish_reason")
STEP = {name + "s": name for name in ROW if name != "messages"} | {"rollouts": "rollouts"}
FORM = "FILE.py:FUNCTION or package.module:FUNCTION"


class Function(Plugin):
    """`reward=function`; a second function is a plugin of five lines."""

    code_options = frozenset({"path"})

    @dataclass
    class Config:
        path: str = "???"  # required: FILE.py:FUNCTION (from the working directory) or package.module:FUNCTION
        weight: float = 1.0  # in the total

    def __init__(self, config):
        super().__init__(config)
        self.function = load(config.path)
        self.names, self.whole_step = parameters(self.function, config.path)

    def files(self):
        return sources(self.function)

    @hookimpl
    def reward(self, rollouts):
        columns = read_columns(rollouts)
        if self.whole_step:
            answer = self.function(**{name: columns[STEP[name]] for name in self.names})
            return (
                self.later(answer, len(rollouts)) if inspect.isawaitable(answer) else self.named(answer, len(rollouts))
            )
        answers = [self.function(**{name: columns[name][row] for name in self.names}) for row in range(len(rollouts))]
        return self.together(answers) if any(map(inspect.isawaitable, answers)) else {self.name: answers}

    async def later(self, answer, rows):
        return self.named(await answer, rows)

    async def together(self, answers):
        return {self.name: await asyncio.gather(*answers)}

    def named(self, answer, rows):
        """{component: values} of a whole step's answer; its lengths are checked here, where the function is known."""
        parts = (
            {f"{self.name}/{key}": values for key, values in answer.items()}
            if isinstance(answer, dict)
            else {self.name: answer}
        )
        for values in parts.values():
            if values is None:
                raise UserError(
                    f"plugins.function: {self.config.path} returned None; a list of {rows} numbers is expected"
                )
            if hasattr(values, "__len__") and len(values) != rows:
                raise UserError(
                    f"plugins.function: {self.config.path} returned {len(values)} values for {rows} completions"
                )
        return parts


def sources(function):
    """The file of a function and those beside it that it imports, directly or not."""
    module = inspect.getmodule(inspect.unwrap(function))
    if not getattr(module, "__file__", None):
        return []  # not written in Python
    folder, found, open_ends = Path(module.__file__).resolve().parent, set(), [module]
    while open_ends:
        module = open_ends.pop()
        file = Path(getattr(module, "__file__", None) or "/").resolve()
        if file in found or folder not in file.parents or "site-packages" in file.relative_to(folder).parts:
            continue
        found.add(file)
        named = vars(module).values()
        open_ends += [
            value if inspect.ismodule(value) else inspect.getmodule(value) for value in named if imports(value)
        ]
    return sorted(map(str, found))


def imports(value):
    return inspect.ismodule(value) or inspect.isclass(value) or inspect.isfunction(value)


def read_columns(rollouts):
    """What a function may ask for: name -> [R] (and the rollouts themselves)."""
    prompts = rollouts.prompts
    texts = list(rollouts.text)
    return {
        "prompt": [question(prompt) for prompt in prompts],
        "completion": texts,
        "text": texts,
        "answer": [prompt.answer for prompt in prompts],
        "messages": [None if prompt.messages is None else list(prompt.messages) for prompt in prompts],
        "extra": [prompt.extra for prompt in prompts],
        "length": rollouts.lengths.tolist(),
        "finish_reason": list(rollouts.finish_reason),
        "rollouts": rollouts,
    }


def question(prompt):
    """The prompt's text: of a chat, the last message of the user."""
    if prompt.messages is None:
        return prompt.text
    return next((message["content"] for message in reversed(prompt.messages) if message["role"] == "user"), "")


def parameters(function, path):
    """(names to pass, whether the function takes the whole step) from the function's signature."""
    try:
        signature = inspect.signature(function).parameters.values()
    except ValueError:
        raise UserError(
            f"plugins.function: {path} has no readable signature; wrap it in a function of your own"
        ) from None
    offered = (*ROW, *STEP)
    for parameter in signature:
        fixed = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        known = parameter.name in offered and parameter.kind is not parameter.POSITIONAL_ONLY
        if not fixed and not known and parameter.default is parameter.empty:
            raise UserError(
                f"plugins.function: {path} requires {parameter.name!r}{nearest(parameter.name, offered)}\n"
                f"offered per completion: {', '.join(ROW)}\noffered per step: {', '.join(STEP)}"
            )
    named = [p.name for p in signature if p.name in offered and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    row, step = [name for name in named if name in ROW], [name for name in named if name in STEP]
    if bool(row) == bool(step):
        why = (
            f"mixes {row[0]!r} (one completion) and {step[0]!r} (the whole step)" if row else "names nothing to reward"
        )
        raise UserError(
            f"plugins.function: {path} {why}\nper completion: {', '.join(ROW)}\nper step: {', '.join(STEP)}"
        )
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature)
    return list((STEP if step else ROW) if everything else named), bool(step)


def load(path):
    """The function behind FILE.py:FUNCTION or package.module:FUNCTION."""
    source, _, name = str(path).rpartition(":")
    if not source or not name:
        raise UserError(f"plugins.function.path is {FORM}, got {path!r}")
    module = load_file(Path(source).expanduser()) if source.endswith(".py") else load_module(source)
    found = getattr(module, name, None)
    if found is None:
        raise unknown(
            f"function of {source}:",
            name,
            [key for key, value in vars(module).items() if callable(value) and key[0] != "_"],
        )
    if not callable(found):
        raise UserError(f"plugins.function.path: {path} is of type {type(found).__name__}, not a function")
    return found


def load_file(file):
    if not file.is_file():
        close = nearest(file.name, [other.name for other in file.parent.glob("*.py")])
        raise UserError(f"plugins.function.path: no file {str(file)!r} in {Path.cwd()}{close}")
    spec = importlib.util.spec_from_file_location(f"grpozoo_function_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up
    reach(file.resolve().parent)
    return imported(str(file), lambda: spec.loader.exec_module(module)) or module


def load_module(name):
    reach(Path.cwd())
    top = name.split(".")[0]
    if importlib.util.find_spec(top) is None:
        close = nearest(top, [module.name for module in pkgutil.iter_modules()])
        raise UserError(
            f"plugins.function.path: no module {top!r} in {Path.cwd()} or among the installed packages{close}\n"
            f"a file is named with its ending: {FORM}"
        )
    return imported(name, lambda: importlib.import_module(name))


def reach(folder):
    """What stands beside the function can be imported by it, as in a script; installed packages come first."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def imported(what, call):
    try:
        return call()
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"plugins.function.path: {what} does not import: {error!r}\nat {where.filename}:{where.lineno}"
        ) from None
