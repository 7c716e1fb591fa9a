"""Bad code of others: plugins, tasks and reward functions that raise, exit, or are not what they should be."""

from bad_inputs import Case, put

FAILS = {  # text of a module -> what the message says
    "raises": ("raise RuntimeError('no GPU')", r"does not import: RuntimeError\('no GPU'\)"),
    "exits": ("import sys\nsys.exit(3)", r"does not import: SystemExit\(3\)"),
    "exits well": ("raise SystemExit", r"does not import: SystemExit\(\)"),
    "imports nothing": ("import nothing_at_all", "does not import: ModuleNotFoundError"),
    "is no Python": ("def (:", "does not import: SyntaxError"),
    "is no text": (b"\xff\xfe\x00", "does not import: SyntaxError|does not import: ValueError"),
    "divides by zero": ("1 / 0", "does not import: ZeroDivisionError"),
    "never returns": ("def f():\n    f()\nf()", "does not import: RecursionError"),
    "talks much": ("raise ValueError('x' * 10**6)", "does not import: ValueError"),
    "lacks the class": ("", "does not import: AttributeError"),
}
HEAD = "from dataclasses import dataclass\nfrom grpozoo import Plugin, hookimpl\nfrom grpozoo.tasks import Task\n"
PLUGINS = {
    "a number": ("Mine = 3", "3 is not a subclass of grpozoo.Plugin"),
    "any class": ("class Mine: pass", "is not a subclass of grpozoo.Plugin"),
    "a function": ("def Mine(config): pass", "is not a subclass of grpozoo.Plugin"),
    "a task": ("Mine = Task", "is not a subclass of grpozoo.Plugin"),
    "of a later version": ("class Mine(Plugin):\n    hook_version = 99", "written for hook version 99"),
    "of no version": ("class Mine(Plugin):\n    hook_version = None", "written for hook version None"),
    "with an unknown need": ("class Mine(Plugin):\n    needs = frozenset({'entropies'})", "did you mean 'entropy'"),
    "with a text for needs": ("class Mine(Plugin):\n    needs = 'entropy'", "Mine.needs is 'entropy'"),
    "with a number for needs": ("class Mine(Plugin):\n    needs = 5", "Mine.needs is 5"),
    "with a text for its order": ("class Mine(Plugin):\n    order = 'first'", "Mine.order is 'first'"),
    "with a list of conflicts": ("class Mine(Plugin):\n    conflicts = ['kl']", "Mine.conflicts is a value of type list"),
    "with a list of metrics": ("class Mine(Plugin):\n    metrics = ['x']", "Mine.metrics is a value of type list"),
    "with a list for options": ("class Mine(Plugin):\n    options_for = ['x']", "Mine.options_for is a value of type list"),
    "with a number for options": ("class Mine(Plugin):\n    Config = 3", "plugins.mine"),
    "with odd options": ("class Mine(Plugin):\n    class Config:\n        x = 1", "plugins.mine"),
    "with options of a class": ("class Mine(Plugin):\n    @dataclass\n    class Config:\n        x: object", "plugins.mine"),
    "with an option to give": ("class Mine(Plugin):\n    @dataclass\n    class Config:\n        x: int", "plugins.mine"),
    "that a start breaks": ("class Mine(Plugin):\n    def __init__(self, config):\n        {}['x']", r"Mine\(\) raised KeyError\('x'\)"),
    "that a start ends": ("class Mine(Plugin):\n    def __init__(self, config):\n        raise SystemExit(2)", r"Mine\(\) raised SystemExit\(2\)"),
    "with wrong values": ("class Mine(Plugin):\n    def __init__(self, config):\n        raise ValueError('x is odd')", "plugins.mine: x is odd"),
    "with a broken range": (
        "class Mine(Plugin):\n    @dataclass\n    class Config:\n        x: int = 1\n"
        "        def __post_init__(self):\n            {}['x']", "plugins.mine",
    ),
    "that validation breaks": ("class Mine(Plugin):\n    @hookimpl\n    def validate(self):\n        1 / 0", r"validate\(\) raised ZeroDivisionError"),
    "that validation ends": ("class Mine(Plugin):\n    @hookimpl\n    def validate(self):\n        raise SystemExit", r"validate\(\) raised SystemExit"),
    "that says 3": ("class Mine(Plugin):\n    @hookimpl\n    def validate(self):\n        return 3", r"validate\(\) answered 3"),
    "with a misspelt hook": ("class Mine(Plugin):\n    @hookimpl\n    def advantages(self):\n        pass", "did you mean 'advantage'"),
    "with a bare hook": ("class Mine(Plugin):\n    def advantage(self):\n        pass", "lacks the decorator @hookimpl"),
    "with an odd argument": ("class Mine(Plugin):\n    @hookimpl\n    def setup(self, runs):\n        pass", "does not fit the hooks: .*runs"),
    "that is one too many": ("class Mine(Plugin):\n    @hookimpl\n    def token_sampler(self):\n        pass", r"iid and mine both replace token_sampler\(\)"),
    "that does not stack": ("class Mine(Plugin):\n    conflicts = {'grpo': 'no'}", "mine does not stack with grpo: no"),
}  # fmt: skip
SETS = "        self.train = self.heldout = "
INIT = "class Mine(Task):\n    Config = Arithmetic.Config\n    def __init__(self, config):\n"
TASKS = {
    "a number": ("Mine = 3", "3 is not a subclass of grpozoo.tasks.Task"),
    "a plugin": ("class Mine(Plugin): pass", "is not a subclass of grpozoo.tasks.Task"),
    "that breaks": (f"{INIT}        {{}}['x']", r"task.mine: Mine\(\) raised KeyError\('x'\)\nat .*\.py:\d+"),
    "that exits": (f"{INIT}        raise SystemExit(1)", r"task.mine: Mine\(\) raised SystemExit\(1\)"),
    "that fails an assertion": (f"{INIT}        assert not config", r"task.mine: Mine\(\) raised AssertionError"),
    "that refuses": (f"{INIT}        raise ValueError('odd')", "task.mine: odd"),
    "without sets": (f"{INIT}        self.config = config", "task.mine: train is a value of type NoneType"),
    "with a number": (f"{INIT}{SETS}3", "task.mine: train is 3"),
    "with texts": (f"{INIT}{SETS}['1+1=']", "task.mine: train holds '1\\+1='"),
    "without a fingerprint": (f"{INIT}{SETS}[Prompt('a', text='1')] * 99", "Mine does not define fingerprint"),
    "with a broken fingerprint": (f"{INIT}{SETS}[Prompt('a', text='1')] * 99\n    def fingerprint(self):\n        1 / 0",
                                  r"task.mine: fingerprint\(\) raised ZeroDivisionError"),
    "of nothing": (f"{INIT}{SETS}[]\n    def fingerprint(self):\n        return ''", "the training set has 0 prompts"),
    "whose set breaks": (f"{INIT}{SETS}({{}}[i] for i in (1, 2))", r"task.mine: Mine\(\) raised KeyError"),
}  # fmt: skip
FUNCTIONS = {
    "no file": ("path=nowhere.py:score", "", "no file 'nowhere.py'"),
    "no module": ("path=nowhere:score", "", "no module 'nowhere'"),
    "no function": ("path={here}/rewards.py", "", "plugins.function.path is"),
    "no name": ("path={here}/rewards.py:", "", "plugins.function.path is"),
    "another name": ("path={here}/rewards.py:scores", "def score(text):\n    return 1", "did you mean 'score'"),
    "a number": ("path={here}/rewards.py:score", "score = 3", "is of type int, not a function"),
    "odd arguments": ("path={here}/rewards.py:score", "def score(text, weather):\n    return 1", "weather"),
    "no arguments": ("path={here}/rewards.py:score", "def score():\n    return 1", "plugins.function"),
    "a folder": ("path={here}:score", "", "plugins.function.path"),
    "an option too many": ("path={here}/rewards.py:score plugins.function.weights=1", "def score(text):\n    return 1", "did you mean 'weight'"),
}  # fmt: skip
REWARD = """
    @hookimpl
    def reward(self, rollouts):
        return {'mine': [float(row) for row in range(len(rollouts))]}
"""  # without differences nothing is trained
HOOKS = {  # what goes wrong while a step is made: body of a hook, what the message says
    "advantage raises": ("advantage(self, rewards)", "1 / 0", r"advantage\(\) raised ZeroDivisionError"),
    "advantage exits": ("advantage(self, rewards)", "raise SystemExit(0)", r"advantage\(\) raised SystemExit\(0\)"),
    "advantage is a list": ("advantage(self, rewards)", "return rewards.total.tolist()", r"advantage\(\) answered a value of type list"),
    "advantage is NaN": ("advantage(self, rewards)", "return rewards.total * float('nan')", "not finite"),
    "rewards of tokens are infinite": ("token_rewards(self, rollouts)", "return rollouts.logprobs + float('inf')", r"token_rewards\(\) answered inf"),
    "inputs are changed": ("before_update(self, advantages)", "advantages.mul_(2)", r"before_update\(\) changed advantages in place"),
    "loss is a number": ("policy_loss(self, batch, out)", f"return 0.0{REWARD}", r"policy_loss\(\) answered 0.0"),
    "setup raises": ("setup(self, run)", "open('/nowhere/at/all')", r"setup\(\) raised FileNotFoundError"),
    "state of a class": ("setup(self, run)", "self.state_dict = lambda: {'x': object()}", r"state_dict\(\)\['x'\] is of type builtins.object"),
    "no parameters": ("select_parameters(self, policy)", "return []", "selected nothing"),
    "step is told": ("after_step(self, metrics)", "metrics['mine/x'] = 'high'", r"after_step\(\) answered metrics"),
}  # fmt: skip
SCORES = {
    "raises": ("return {}['x']", r"KeyError\('x'\)"),
    "exits": ("raise SystemExit(0)", r"SystemExit\(0\)"),
    "is a text": ("return 'good'", "'good'"),
    "is infinite": ("return float('inf')", "inf"),
    "hangs": ("import time\n    time.sleep(8)", "reward_timeout"),
}


def code() -> list[Case]:
    """Everything of this file."""
    found = []
    for name, (text, message) in FAILS.items():
        found.append(_plugin(name, text, message))
        found.append(_task(name, text, message))
        function = message.replace("lacks", "").replace("does not import: AttributeError", "unknown function")
        found.append(_function(name, "path={here}/rewards.py:score", text, function))
    found += [_plugin(name, HEAD + text, message) for name, (text, message) in PLUGINS.items()]
    imports = HEAD + "from grpozoo import Prompt\nfrom grpozoo.tasks.arithmetic import Arithmetic\n"
    found += [_task(name, imports + text, message) for name, (text, message) in TASKS.items()]
    found += [_function(name, *row) for name, row in FUNCTIONS.items()]
    for name, (hook, body, message) in HOOKS.items():
        text = f"{HEAD}class Mine(Plugin):\n    @hookimpl\n    def {hook}:\n        {body}\n"
        dropped = {"policy_loss": (), "select_parameters": ("~plugins.full",)}.get(hook.split("(")[0], ())
        found.append(_plugin(name, text, message, late=True, more=dropped))
    for name, (body, message) in SCORES.items():
        words = "path={here}/rewards.py:score reward_timeout=2"
        found.append(_function(f"score {name}", words, f"def score(text):\n    {body}\n", message, late=True))
    return found


def _plugin(name, text, message, late=False, more=()):
    words = ("+plugins.mine={}", *more)
    return Case(f"plugin {name}", words, message, put("mine_of_them.py", text), late, ("grpozoo", "mine"))


def _task(name, text, message):
    entry = ("grpozoo.tasks", "mine")
    return Case(f"task {name}", ("task.kind=mine",), message, put("mine_of_them.py", text), entry=entry)


def _function(name, words, text, message, late=False):
    words = ("reward=function", *(f"plugins.function.{words}".split()))
    return Case(f"function {name}", words, message, put("rewards.py", text), late)
