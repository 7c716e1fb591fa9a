"""Secrets: a run folder names environment variables and holds none of their values; a foreign one reads none."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from grpozoo import UserError
from grpozoo.compose.command import compose
from grpozoo.compose.environment import check_consent, check_passwords, recorded, variables
from grpozoo.compose.resume import goes_on_with
from grpozoo.compose.settings import Settings, comparable, fingerprint, read_core
from grpozoo.run.tracking import Tracker

TEXTS = {
    "a": "${oc.env:SECRET}",
    "b": "x-${a}",  # by way of another key
    "c": {"d": ["${oc.env:SECRET,none}", 1, "${lr}"]},
    "lr": 0.5,
    "f": "${c}",
    "w": "oc",
    "g": "${${w}.env:SECRET}",  # the name of the resolver is put together
    "k": "${oc.decode:${oc.env:SECRET}}",
    "n": None,
}
JUDGE = ["algo=scope_rl", "plugins.scope_rl.judge=endpoint", "plugins.scope_rl.model=m"]
URL = "plugins.scope_rl.url"


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")


def test_what_is_recorded_names_the_variable_and_resolves_the_rest():
    config = OmegaConf.create(TEXTS)
    kept = recorded(config)
    assert "s3cret" not in repr(kept)
    assert kept["c"]["d"] == ["${oc.env:SECRET,none}", 1, 0.5] == kept["f"]["d"]
    assert {key: kept[key] for key in "abgkn"} == {key: TEXTS[key] for key in "abgkn"}
    assert OmegaConf.create(kept).b == "x-s3cret" == config.b  # and reads back as what it was
    assert set(variables(config)) == {"a", "b", "c.d[0]", "f.d[0]", "g", "k"}


def test_text_that_only_looks_like_an_interpolation_reads_back_as_itself():
    config = OmegaConf.create({"plain": r"\${oc.env:SECRET}", "deep": r"\\\${x}"})
    again = OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(recorded(config))))
    assert (again.plain, again.deep) == (config.plain, config.deep) == ("${oc.env:SECRET}", r"\${x}")


def test_the_files_of_a_run_hold_no_secret_and_its_hash_does_not_depend_on_it(monkeypatch):
    composed = compose([*JUDGE, f"{URL}='http://${{oc.env:SECRET}}@host'"])
    settings = Settings(SimpleNamespace(), SimpleNamespace(), SimpleNamespace(), composed)
    assert "s3cret" not in settings.yaml() and "${oc.env:SECRET}" in settings.yaml()
    before = fingerprint(composed)
    monkeypatch.setenv("SECRET", "another")
    assert fingerprint(composed) == before and "another" not in repr(comparable(composed))


@pytest.mark.parametrize("url", ["http://me:pw@host/v1", "https://:pw@host", "postgres://me:p%40w@h:1/x"])
def test_a_password_in_a_url_is_refused_with_the_way_out(url):
    with pytest.raises(UserError, match=rf"{URL} holds a password.*\n.*write {URL}='\$\{{oc\.env:NAME\}}'") as error:
        check_passwords(OmegaConf.create({"plugins": {"scope_rl": {"url": url}}}))
    assert "pw" not in str(error.value).replace("password", "")


def test_urls_without_a_password_pass():
    check_passwords(OmegaConf.create({"a": "http://host:80/x@y", "b": "http://me@host", "c": ["${oc.env:SECRET}"]}))


@pytest.fixture
def checkpoint(tmp_path):
    """A saved configuration that reads a variable."""
    saved = compose([*JUDGE, f"{URL}='${{oc.env:SECRET}}'"])
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(saved))
    return tmp_path


def test_a_resumed_configuration_reads_no_variable_that_this_command_does_not(checkpoint):
    words = [f"resume={checkpoint}"]
    with pytest.raises(
        UserError, match=rf"reads the environment variable SECRET \({URL}\)\n.*{URL}='\$\{{oc\.env:SECRET\}}'"
    ):
        goes_on_with(compose(words), words, checkpoint)


def test_a_resumed_configuration_reads_what_this_command_says(checkpoint):
    words = [f"resume={checkpoint}", *JUDGE, f"{URL}='${{oc.env:SECRET}}'"]
    again = goes_on_with(compose(words), words, checkpoint)
    assert again.plugins.scope_rl.url == "s3cret" and "s3cret" not in repr(recorded(again))
    other = [*words[:-1], f"{URL}='${{oc.env:HOME}}'"]
    with pytest.raises(UserError, match="SECRET"):
        check_consent(OmegaConf.load(checkpoint / "config.yaml"), compose(other))


def test_the_project_of_a_logger_is_a_name_and_no_path():
    from grpozoo.config import Logger

    for name in ("../../x", "a/b", "..", "", "a\\b"):
        with pytest.raises(UserError, match="logger.project is a name without /"):
            Logger(project=name).check()
    Logger(project="a.b-c d").check()


def test_trackers_are_told_what_the_run_folder_keeps(tmp_path):
    told = []

    class Accelerator:
        def init_trackers(self, project, config, init_kwargs):
            told.append(config)

        def log(self, values, step):
            pass

    composed = compose([*JUDGE, f"{URL}='${{oc.env:SECRET}}'"])
    tracker = Tracker(tmp_path, read_core(composed), Accelerator(), record=recorded(composed))
    tracker.log(0, {"update/lr": 0.1})
    assert told[0][URL] == "${oc.env:SECRET}" and told[0]["optim.betas"] == "[0.9, 0.999]"
