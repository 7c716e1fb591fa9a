"""The conformance kit: a batch worked by hand, numbers through the shipped functions, and `check_plugin`.

from grpozoo.testing import check_plugin, loss

def test_conformance():
    check_plugin("mine", "algo=mine")

def test_loss_of_the_worked_example():
    value, gradient = loss("algo=mine", "plugins.mine.x=2")
    assert value == pytest.approx(0.123456, abs=1e-6)
"""

from grpozoo.testing.context import Context
from grpozoo.testing.example import Fixture, assemble, example, fixture
from grpozoo.testing.golden import advantages, compose, loss
from grpozoo.testing.kit import CHECKS, check_plugin
from grpozoo.testing.subject import ConformanceError

__all__ = [
    "CHECKS",
    "ConformanceError",
    "Context",
    "Fixture",
    "advantages",
    "assemble",
    "check_plugin",
    "compose",
    "example",
    "fixture",
    "loss",
]
