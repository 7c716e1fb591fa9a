"""reward=format: the default tags, own patterns, and patterns that never end."""

import time

import pytest
from grpozoo_plugins.format import Format, Match
from reward_rows import column, rows


@pytest.mark.parametrize("text, expected", [
    ("<think>a\nb</think><answer>3</answer>", 1.0),
    ("\n<think>a < b</think>\n\n<answer>\n3\n</answer>\n", 1.0),
    ("<think></think><answer></answer>", 1.0),
    ("sure: <think>a</think><answer>3</answer>", 0.0),
    ("<think>a</think><answer>3</answer> done", 0.0),
    ("<think>a</think> so <answer>3</answer>", 0.0),
    ("<answer>3</answer><think>a</think>", 0.0),
    ("<think>a</think><answer>3</answer><answer>4</answer>", 0.0),
    ("<think>a<think>b</think></think><answer>3</answer>", 0.0),
    ("<think>a</think><answer>3", 0.0),
    ("", 0.0),
])  # fmt: skip
def test_the_default_is_one_thought_and_one_answer(text, expected):
    assert column(Format(Format.Config()), "format", rows([text])) == [expected]


@pytest.mark.parametrize("match, expected", [(Match.full, [1.0, 0.0, 0.0]), (Match.search, [1.0, 1.0, 0.0])])
def test_full_means_the_whole_text_and_search_any_part(match, expected):
    plugin = Format(Format.Config(pattern=r"\d+#\d+", match=match))
    assert column(plugin, "format", rows(["12#95", "12#95 ", "12"])) == expected


def test_a_pattern_that_backtracks_for_ever_is_no_answer_and_is_counted():
    plugin = Format(Format.Config(pattern="(a|aa)+$", seconds=0.2))
    start = time.monotonic()
    assert column(plugin, "format", rows(["a" * 60 + "b", "aaa"])) == [None, 1.0]
    assert time.monotonic() - start < 5
    assert plugin.logged == [("format/failures", 0.5, 2.0)]


@pytest.mark.parametrize("options, message", [
    ({"pattern": "(a"}, r"pattern '\(a' is not a regular expression: missing \)"),
    ({"seconds": 0.0}, "seconds is positive"),
])  # fmt: skip
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Format.Config(**options)
