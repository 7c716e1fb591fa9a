"""The door of `python -m grpozoo ARGS` without a process and without Hydra's second per command: what came of a command.

Hydra reads twenty config files for the chosen groups, then sets keys. The files are read once for each choice of groups;
the keys are set by Hydra's own function, and from there on it is what the main program does.
"""

import signal
import sys
import traceback
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from grpozoo import models
from grpozoo.cli import train
from grpozoo.cli.flags import arranged
from grpozoo.cli.messages import EXPECTED, explain
from grpozoo.compose import command, search_path

SECONDS = 30  # of a clock that a case may take


@dataclass(frozen=True)
class Outcome:
    """What came of a command."""

    kind: str  # refused | accepted (it came to the model) | trained | traceback | hang
    text: str  # what the user reads
    reached: bool  # the loading of the model


class Accepted(BaseException):
    """Raised where the model would be loaded."""


class Hang(BaseException):
    """Raised after SECONDS."""


def knock(words, folder, monkeypatch, whole=False):
    """The outcome of a command in a working directory. whole: the model is loaded, and the run goes on."""
    reached, load = [], models.load

    def noted(*arguments, **named):
        reached.append(True)
        if not whole:
            raise Accepted
        return load(*arguments, **named)

    with monkeypatch.context() as patch, _limited():
        patch.setattr(models, "load", noted)
        patch.setattr(sys, "argv", ["grpozoo", *words])
        patch.chdir(folder)
        kind, text = _outcome(words, folder)
    return Outcome(kind, text, bool(reached))


def _outcome(words, folder):
    try:
        words, _ = arranged(list(words))
        train.run(composed(words), words, str(folder / "run"))
        return "trained", ""
    except (*EXPECTED, HydraException) as error:
        text = explain(error)
        return ("hang" if "raised Hang(" in text else "refused"), text
    except Accepted:
        return "accepted", ""
    except Hang:
        return "hang", ""
    except BaseException:  # SystemExit included: it ends the program without a word
        return "traceback", traceback.format_exc()[-2000:]


def composed(words):
    """The configuration of a command, as Hydra composes it."""
    command.check(words)
    search_path.check_choices(words)
    parsed = OverridesParser.create().parse_overrides(list(words))
    groups = {*search_path.groups(), *search_path.defaults()}
    chosen = tuple(word for word, key in zip(words, parsed, strict=True) if key.key_or_group in groups)
    config = deepcopy(_chosen(chosen))
    ConfigLoaderImpl._apply_overrides_to_config([key for key in parsed if key.key_or_group not in groups], config)
    return config


@cache
def _chosen(words):
    return command.compose(list(words))


@contextmanager
def _limited():
    """Hang, raised in the main thread, wherever it waits."""

    def ring(*_):
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
