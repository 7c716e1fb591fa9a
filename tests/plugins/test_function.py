"""reward=function: where a function is found, what it may ask for, and every way to get that wrong."""

import sys
from pathlib import Path

import pytest
import torch
from grpozoo_plugins.function import ROW, STEP, Function
from reward_rows import column, rewards_of, rows

from grpozoo import Prompt, UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def plugin(folder, code, name="score"):
    (folder / "my_rewards.py").write_text(code)
    return Function(Function.Config(path=f"my_rewards.py:{name}"))


BATCH = rows(["four", "a"], ["four", "b"], lengths=[3, 1])


@pytest.mark.parametrize("code, expected", [
    ("score = lambda text: len(text)", [4.0, 1.0]),
    ("def score(completion, answer): return completion == answer", [1.0, 0.0]),
    ("def score(length, finish_reason): return length if finish_reason == 'stop' else 0", [3.0, 1.0]),
    ("def score(prompt, extra, messages): return (prompt, extra, messages) == ('question 1', {}, None)", [0.0, 1.0]),
    ("def score(text, scale=2): return scale * len(text)", [8.0, 2.0]),
    (f"def score(text, **rest): return {{'text', *rest}} == set({ROW})", [1.0, 1.0]),
    ("def score(text): return None if text == 'a' else 1", [1.0, None]),
    ("async def score(text): return len(text)", [4.0, 1.0]),
    ("def score(completions, answers): return [c == a for c, a in zip(completions, answers)]", [1.0, 0.0]),
    ("def score(completions, **kwargs): return kwargs['lengths']", [3.0, 1.0]),
    ("def score(rollouts): return rollouts.lengths * 2", [6.0, 2.0]),
    ("async def score(texts): return [len(t) for t in texts]", [4.0, 1.0]),
    ("class Judge:\n    def __call__(self, text): return len(text)\nscore = Judge()", [4.0, 1.0]),
])  # fmt: skip
def test_a_function_gets_what_its_signature_names(folder, code, expected):
    assert column(plugin(folder, code), "function", BATCH) == expected


def test_async_calls_of_a_step_run_together(folder):
    code = "import asyncio\nmeet = asyncio.Barrier(2)\nasync def score(text):\n    await meet.wait()\n    return 1"
    assert column(plugin(folder, code), "function", BATCH) == [1.0, 1.0]


def test_a_dict_of_lists_is_one_component_each(folder):
    made = plugin(folder, "def score(texts): return {'long': [len(t) for t in texts], 'one': [1 for t in texts]}")
    rewards = rewards_of({"function": made}, BATCH)
    assert {name: values.tolist() for name, values in rewards.components.items()} == {
        "function/long": [4, 1],
        "function/one": [1, 1],
    }


def test_the_prompt_of_a_chat_is_the_last_message_of_the_user(folder):
    chat = (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "why?"},
        {"role": "assistant", "content": "<think>"},
    )
    batch = rows(["t"], prompts=[Prompt("p0", messages=chat, answer="1")])
    made = plugin(folder, "def score(prompt, messages): return prompt == 'why?' and len(messages) == 3")
    assert column(made, "function", batch) == [1.0]


def test_weights_apply_to_every_component(folder):
    made = plugin(folder, "def score(texts): return {'a': [1, 1]}")
    made.config.weight = 0.25
    assert rewards_of({"function": made}, BATCH).weights == {"function/a": 0.25}


@pytest.mark.parametrize("signature, message", [
    ("text, answr", r"requires 'answr', did you mean 'answer'\?\n.*completion: prompt, .*\n.* per step: prompts"),
    ("text, /", r"requires 'text'"),
    ("text, answers", r"mixes 'text' \(one completion\) and 'answers' \(the whole step\)"),
    ("**kwargs", r"names nothing to reward"),
    ("", r"names nothing to reward"),
])  # fmt: skip
def test_a_signature_that_does_not_fit_is_refused_at_the_start(folder, signature, message):
    with pytest.raises(UserError, match=message):
        plugin(folder, f"def score({signature}): return 1")


@pytest.mark.parametrize("code, message", [
    ("def score(texts): return [1]", r"my_rewards\.py:score returned 1 values for 2 completions"),
    ("def score(texts): return {'x': [1, 2, 3]}", r"my_rewards\.py:score returned 3 values for 2 completions"),
    ("async def score(texts): return [1]", r"my_rewards\.py:score returned 1 values for 2 completions"),
    ("def score(texts): pass", r"my_rewards\.py:score returned None"),
    ("def score(texts): return 1", r"plugins\.function: reward 'function' is one number per completion .*got int"),
    ("def score(text): return 'yes'", r"plugins\.function: reward 'function' is 'yes' \(str\) for row 0, prompt 'p0'"),
    ("def score(text):\n    return missing", r"raised NameError.*\nat .*my_rewards\.py:2"),
    ("def score(text):\n    import json\n    json.loads('x')", r"raised JSONDecodeError.*\nat .*my_rewards\.py:3"),
    ("async def score(text):\n    return missing", r"raised NameError.*\nat .*my_rewards\.py:2"),
])  # fmt: skip
def test_a_bad_answer_names_the_function_or_its_line(folder, code, message):
    with pytest.raises(UserError, match=message):
        column(plugin(folder, code), "function", BATCH)


def test_names_beside_the_file_can_be_imported(folder):
    (folder / "other").mkdir()
    (folder / "other" / "beside_the_rewards.py").write_text("value = 7")
    (folder / "other" / "mine.py").write_text("from beside_the_rewards import value\ndef score(text): return value")
    assert column(Function(Function.Config(path="other/mine.py:score")), "function", BATCH) == [7.0, 7.0]


def test_a_module_of_a_package_is_found_by_name(folder):
    (folder / "my_package").mkdir()
    (folder / "my_package" / "rewards.py").write_text("def score(text): return len(text)")
    assert column(Function(Function.Config(path="my_package.rewards:score")), "function", BATCH) == [4.0, 1.0]


@pytest.mark.parametrize("path, message", [
    ("my_rewards.py", r"is FILE\.py:FUNCTION or package\.module:FUNCTION, got 'my_rewards\.py'"),
    ("my_rewards.py:", r"is FILE\.py:FUNCTION"),
    ("my_reward.py:score", r"no file 'my_reward\.py' in .*, did you mean 'my_rewards\.py'\?"),
    ("my_rewards.py:scor", r"unknown function of my_rewards\.py: 'scor', did you mean 'score'\?\navailable: score"),
    ("my_rewards.py:number", r"my_rewards\.py:number is of type int, not a function"),
    ("my_rewards:scor", r"unknown function of my_rewards: 'scor', did you mean 'score'\?"),
    ("reward_rowz:rows", r"no module 'reward_rowz' .*, did you mean 'reward_rows'\?"),
    ("broken.py:score", r"broken\.py does not import: ZeroDivisionError.*\nat .*broken\.py:2"),
    ("broken:score", r"broken does not import: ZeroDivisionError"),
    ("my_rewards.inner:score", r"my_rewards\.inner does not import: ModuleNotFoundError"),
])  # fmt: skip
def test_a_path_that_leads_nowhere_is_refused_at_the_start(folder, path, message):
    (folder / "my_rewards.py").write_text("number = 1\ndef score(text): return 1")
    (folder / "broken.py").write_text("# a mistake\n1 / 0")
    for name in ("my_rewards", "broken"):
        sys.modules.pop(name, None)
    with pytest.raises(UserError, match=message):
        Function(Function.Config(path=path))


def test_everything_offered_is_there_for_every_row(folder):
    row = plugin(folder, f"def score({', '.join(ROW)}): return 1")
    step = plugin(folder, f"def score({', '.join(STEP)}): return [len(rollouts)] * len(texts)")
    assert column(row, "function", BATCH) == [1.0, 1.0] and column(step, "function", BATCH) == [2.0, 2.0]


def test_a_function_may_run_a_model_without_a_graph(folder):
    code = "import torch\nlayer = torch.nn.Linear(1, 1)\ndef score(texts): return layer(torch.ones(2, 1)).squeeze(1)"
    made = plugin(folder, code)
    assert not rewards_of({"function": made}, BATCH).components["function"].requires_grad
    assert torch.is_grad_enabled()


def test_its_files_are_what_decides_the_reward(folder):
    """The file and those beside it that it imports, directly or not; not the standard library, nor an environment below."""
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "installed_of_files.py").write_text("def f():\n    pass\n")
    (folder / "inner_of_files.py").write_text("LIMIT = 3\n")
    (folder / "outer_of_files.py").write_text("import inner_of_files\n\n\ndef limit(): return inner_of_files.LIMIT\n")
    (folder / "unused_of_files.py").write_text("")
    code = (
        "import json, sys\nsys.path.append('site-packages')\nfrom outer_of_files import limit\n"
        "from installed_of_files import f\ndef score(text): return limit()\n"
    )
    names = [Path(file).name for file in plugin(folder, code).files()]
    assert names == ["inner_of_files.py", "my_rewards.py", "outer_of_files.py"]
