"""reward=numeric: which number is read, and when two are equal."""

from decimal import Decimal

import pytest
from grpozoo_plugins.numeric import Numeric, last_number, number_after
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_rows import column, rows

from grpozoo import UserError


@pytest.mark.parametrize("text, number", [
    ("12", "12"), ("so 12+35=47", "47"), ("-3.5", "-3.5"), ("x=-3", "-3"), ("12-5", "5"), ("(3)-5", "5"),
    ("7 - 5", "5"), ("+4", "4"),
    ("\u22124", "-4"), ("-$1,234.50", "-1234.5"), ("1,234,567", "1234567"), ("1,23", "23"),
    ("1,2345", "2345"), ("2, 3,4", "4"),
    (".5", "0.5"), ("3.", "3"), ("2e-3", "0.002"), ("1E5", "100000"), ("3/4", "0.75"),
    ("-1/8", "-0.125"), ("1,000/4", "250"),
    ("50%", "50"), ("12 apples.", "12"), ("H2O", "2"), ("7 and 1/0", "7"), ("0042", "42"),
    ("", None), ("none", None), ("1/0", None), ("1e99999999999999999999", None), ("\u0664", None),
])  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize("text, number", [
    ("9 #### 5 of 6", "5"), ("#### 1\n#### 2", "2"), ("9", None), ("9 ####", None), ("####x 1/4.", "0.25"),
])  # fmt: skip
def test_the_first_number_after_the_last_marker(text, number):
    assert number_after(text, "####") == (None if number is None else Decimal(number))


@pytest.mark.parametrize("options, text, answer, expected", [
    ({}, "the sum is 1,234.0", "1234", 1.0),
    ({}, "0.75", "3/4", 1.0),
    ({}, "0.1", "1/10", 1.0),
    ({}, "0.33333", "1/3", 0.0),
    ({}, "9007199254740993", "9007199254740992", 0.0),  # equal as floats
    ({}, "I give up", "3", 0.0),
    ({}, "0.5", "50%", 0.0),
    ({"marker": "####"}, "7 #### 8", "7", 0.0),
    ({"marker": "####"}, "7 #### 8", "#### 8", 1.0),
    ({"marker": "####"}, "8", "8", 0.0),
    ({"abs_tol": 0.01}, "3.14", "3.15", 1.0),  # the difference is exactly the tolerance
    ({"abs_tol": 0.01}, "3.14", "3.151", 0.0),
    ({"rel_tol": 0.01}, "99", "100", 1.0),
    ({"rel_tol": 0.01}, "-99", "-100", 1.0),
    ({"rel_tol": 0.01}, "98.9", "100", 0.0),
    ({}, "3", None, None),
    ({}, "3", "three", None),
])  # fmt: skip
def test_right_wrong_and_missing(options, text, answer, expected):
    assert column(Numeric(Numeric.Config(**options)), "numeric", rows([text, "1"], [answer, "1"])) == [
        expected,
        float("marker" not in options),
    ]


def test_a_task_without_numbers_is_an_error():
    with pytest.raises(UserError, match=r"plugins\.numeric: no prompt has a number in its answer, e\.g\. 'Paris'"):
        column(Numeric(Numeric.Config()), "numeric", rows(["1"], ["Paris"]))


@pytest.mark.parametrize("options, message", [
    ({"abs_tol": -1.0}, "abs_tol is at least 0"), ({"rel_tol": float("nan")}, "rel_tol is at least 0"),
    ({"marker": ""}, "marker"),
])  # fmt: skip
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Numeric.Config(**options)


@settings(deadline=None)
@given(st.integers(-(10**30), 10**30), st.text(st.characters(categories=["L", "Zs"]), max_size=8))
def test_every_integer_is_read_back_with_and_without_separators(number, words):
    assert last_number(f"{words} {number} {words}") == last_number(f"{words}={number:,}.") == number


@settings(deadline=None)
@given(st.text())
def test_any_text_is_read_without_an_error(text):
    assert last_number(text) is None or last_number(text).is_finite()
