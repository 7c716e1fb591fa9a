"""reward=overlong: the published numbers and the range of the options."""

from types import SimpleNamespace

import pytest
from grpozoo_plugins.overlong import Overlong
from reward_rows import column, rows

from grpozoo import UserError


def run(longest):
    return SimpleNamespace(config=SimpleNamespace(max_completion_length=longest))


@pytest.mark.parametrize(
    "length, expected", [(16384, 0.0), (16385, -0.000244140625), (18432, -0.5), (20480, -1.0), (20481, -1.0)]
)
@pytest.mark.parametrize("options", [{"max_length": 20480, "cache": 4096}, {"max_length": 20480}])
def test_the_published_setting(options, length, expected):
    """DAPO: L_max = 20480, L_cache = 4096; 1/4096 = 0.000244140625 for the first token too many."""
    assert column(Overlong(Overlong.Config(**options)), "overlong", rows(["t"], lengths=[length]), run(1)) == [expected]


def test_the_longest_completion_of_the_run_is_the_default():
    """L_max = 60, L_cache = 60 / 5 = 12: 48 is free, 51 costs 3/12, 60 everything."""
    plugin = Overlong(Overlong.Config())
    assert column(plugin, "overlong", rows(["t"] * 4, lengths=[1, 48, 51, 60]), run(60)) == [0.0, 0.0, -0.25, -1.0]
    assert plugin.logged == [("overlong/punished", 0.5, 4.0)]


@pytest.mark.parametrize("longest", [1, 2, 4])
def test_tiny_lengths_divide_by_one(longest):
    assert column(Overlong(Overlong.Config()), "overlong", rows(["t"], lengths=[longest]), run(longest)) == [-1.0]


@pytest.mark.parametrize("name", ["max_length", "cache"])
def test_lengths_are_positive(name):
    with pytest.raises(ValueError, match=f"{name} is at least 1 token or null, got 0"):
        Overlong.Config(**{name: 0})


def test_a_cache_longer_than_the_completions_is_refused_before_the_run():
    plugin = Overlong(Overlong.Config(cache=65))
    plugin.name = "overlong"
    with pytest.raises(
        UserError, match=r"plugins\.overlong\.cache = 65 tokens is more than the longest completion, 64"
    ):
        plugin.validate(run(64).config)
    plugin.validate(run(65).config)
