"""What the suite reads thousands of times and what does not change while it runs, read once.

Each composition of a command line parses some twenty config files and scans the installed distributions five times: a
third of a second. Imported before anything of ours, so that every module gets these.
"""

import importlib.metadata
import io
import os
from copy import deepcopy
from functools import cache

from omegaconf import OmegaConf


def _parsed_once(load):
    """OmegaConf.load, each version of a file once; what it answers is the caller's own."""
    known = {}

    def loaded(file):
        name = getattr(file, "name", None) if isinstance(file, io.TextIOBase) else file  # Hydra opens them itself
        if not isinstance(name, str | os.PathLike):
            return load(file)
        state = os.stat(name)
        version = (os.fspath(name), state.st_ino, state.st_mtime_ns, state.st_size)
        if version not in known:
            known[version] = load(file)
        return deepcopy(known[version])

    return loaded


OmegaConf.load = staticmethod(_parsed_once(OmegaConf.load))
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)
