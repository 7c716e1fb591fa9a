"""Hundreds of bad inputs: each gets one sentence, in bounded time, and hardly any of them needs a model for it."""

import re
import sys
from importlib.metadata import EntryPoint, entry_points
from types import SimpleNamespace

import pytest
from bad_code import code
from bad_inputs import FEW, TINY, data, places, words
from bad_options import cases
from bad_runs import model_folders, model_paths, runs
from door import knock

SHORT = ["logger.trackers=[]", "logger.progress=false"]
CASES = [*cases(), *words(), *places(), *data(), *code(), *model_folders(), *model_paths(), *runs()]
DIALECT = re.compile(
    r"Traceback|HYDRA_FULL_ERROR|full_key|object_type|Error merging|ConfigComposition|Could not override"
)
OUTCOMES = {}


def outcome(case, folder, monkeypatch):
    case.prepare(folder)
    asked = [word.replace("{here}", str(folder)) for word in case.words]
    base = [word for word in (*(TINY if case.late else SHORT), *FEW) if not _said(word, asked)]
    with monkeypatch.context() as patch:
        if case.entry:
            install(*case.entry, folder, patch)
        return knock([*base, *asked], folder, monkeypatch, whole=case.late)


def install(group, name, folder, patch):
    """The class Mine of the folder's mine_of_them.py, as the distribution `theirs 1.2` would bring it."""
    entry = EntryPoint(name, "mine_of_them:Mine", group)
    entry = entry._for(SimpleNamespace(name="theirs", version="1.2", metadata={"Name": "theirs"}))
    found = {place: [*entry_points(group=place), *[entry] * (place == group)] for place in ("grpozoo", "grpozoo.tasks")}
    patch.setattr("grpozoo.compose.registry.entry_points", lambda group: found[group])
    patch.syspath_prepend(folder)
    patch.delitem(sys.modules, "mine_of_them", raising=False)


def _said(word, asked):
    """Whether the case itself sets the key, takes its section away, or has a task, a model or a run of its own."""
    key = word.split("=")[0]
    keys = {other.lstrip("+~").split("=")[0] for other in asked}
    shape = "model.path" in keys and key.startswith("model.")
    return shape or "resume" in keys or key in keys or key.split(".")[0] in keys


@pytest.mark.parametrize("case", CASES, ids=[case.name.replace("\0", "0") for case in CASES])
def test_a_bad_input_gets_one_sentence(case, tmp_path, monkeypatch):
    came = OUTCOMES[case.name] = outcome(case, tmp_path, monkeypatch)
    assert came.kind == "refused", came.text
    assert re.search(case.message, came.text), came.text
    assert len(came.text.splitlines()) <= 6 and len(came.text) < 1500 and not DIALECT.search(came.text), came.text
    assert case.late or not came.reached
