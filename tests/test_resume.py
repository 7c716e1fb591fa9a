"""What may differ between the parts of a resumed run, and whose code it runs."""

import json
import re
import shutil
from dataclasses import fields

import pytest
from omegaconf import OmegaConf
from test_runs import SMALL, digest, one_thread, train  # noqa: F401

from grpozoo import UserError
from grpozoo.cli.train import train as training_job
from grpozoo.compose.command import compose
from grpozoo.compose.resume import ROUNDING, code_keys, consent_words, goes_on_with, may_change
from grpozoo.config import Checkpoint, Config, Eval, Logger, Model, Update


def saved(folder, *overrides):
    """A checkpoint as far as its configuration goes."""
    folder.mkdir(exist_ok=True)
    OmegaConf.save(compose(list(overrides)), folder / "config.yaml")
    return folder


def go_on(checkpoint, *overrides):
    return goes_on_with(compose(list(overrides)), list(overrides), checkpoint)


@pytest.mark.parametrize(
    "change",
    [
        "max_prompt_length=2000", "reward_timeout=600", "eval.every=1", "eval=default", "logger=files", "checkpoint.keep=5",
        "model.path=/moved", "steps=7", "update.logits_chunk=64", "update.activation_memory_mb=64", "model.attention=eager",
    ],
)  # fmt: skip
def test_what_does_not_enter_training_may_change(tmp_path, change):
    """Alone beside resume=, or with the whole command once more; the rest stays what it was."""
    checkpoint = saved(tmp_path, "seed=5")
    key, value = change.split("=")
    for command in ([change], ["seed=5", change]):
        config = go_on(checkpoint, *command)
        assert config.seed == 5 and str(OmegaConf.select(config, key)) in (
            value,
            str(OmegaConf.select(compose(command), key)),
        )


@pytest.mark.parametrize(
    "change",
    [
        "lr=1",
        "group_size=4",
        "temperature=0.5",
        "eval.correct=answer",
        "plugins.grpo.clip=0.1",
        "model.dtype=bfloat16",
        "task.level=1",
    ],
)
def test_what_decides_what_is_learned_may_not(tmp_path, change):
    key = change.split("=")[0]
    with pytest.raises(
        UserError, match=f"(?s){re.escape(key)}: .* then, .* now\n.*may change: .*max_prompt_length.*, steps, but not"
    ):
        go_on(saved(tmp_path), change)


def test_steps_belong_to_a_schedule_that_ends_with_them(tmp_path):
    with pytest.raises(UserError, match="steps: 100 then, 200 now"):
        go_on(saved(tmp_path, "optim.schedule=linear"), "steps=200")


def test_every_core_key_is_either():
    """Nothing of what only watches or places a run is forgotten when a key is added to these sections."""
    config = compose([])
    for section, name in ((Eval, "eval"), (Checkpoint, "checkpoint"), (Logger, "logger")):
        assert {f.name for f in fields(section) if not may_change(f"{name}.{f.name}", config)} <= {"correct"}
    fixed = {f.name for f in fields(Update) if not may_change(f"update.{f.name}", config)}
    assert fixed == {"mini_batches", "epochs"} and {f"update.{f.name}" for f in fields(Update)} - ROUNDING <= {
        f"update.{name}" for name in fixed
    }
    assert (
        not may_change("model.dtype", config) and not may_change("update", config) and not may_change("model", config)
    )
    assert {f.name for f in fields(Model) if may_change(f"model.{f.name}", config)} == {
        "path", "attention", "trust_remote_code", "allow_pickle"
    }  # fmt: skip
    assert not {"seed", "lr", "plugins", "task", "sampling", "optim"} & {
        f.name for f in fields(Config) if may_change(f.name, config)
    }


def test_moved_files_may_be_named_anew(tmp_path):
    checkpoint = saved(tmp_path, "task=jsonl", "task.path=/old.jsonl")
    assert go_on(checkpoint, "task=jsonl", "task.path=/new.jsonl").task.path == "/new.jsonl"
    with pytest.raises(UserError, match="task.suffix"):
        go_on(checkpoint, "task=jsonl", "task.path=/new.jsonl", "task.suffix=x")


FOREIGN = [
    "reward=function",
    "plugins.function.path=my reward.py:score",
    "model.trust_remote_code=true",
    "model.path=/theirs",
]


def test_a_folder_runs_no_code_that_the_command_does_not_name(tmp_path):
    checkpoint = saved(tmp_path, *FOREIGN)
    words = "model.trust_remote_code=true '+plugins.function.path='\"'\"'my reward.py:score'\"'\"''"
    with pytest.raises(UserError) as refused:
        go_on(checkpoint, "steps=200")
    assert "runs code: model.trust_remote_code, plugins.function.path (the code of /theirs)" in str(refused.value)
    assert str(refused.value).endswith(words) and " ".join(consent_words(compose(FOREIGN))) == words
    typed = ["model.trust_remote_code=true", "+plugins.function.path='my reward.py:score'"]  # as the shell hands it on
    assert go_on(checkpoint, *typed, "steps=200").plugins.function.path == "my reward.py:score"
    assert go_on(checkpoint, *FOREIGN).steps == 100
    with pytest.raises(UserError, match="runs code: model.trust_remote_code"):
        go_on(checkpoint, typed[1])


def test_another_file_than_the_one_consented_to_is_another_configuration(tmp_path):
    with pytest.raises(UserError, match="plugins.function.path: 'my reward.py:score' then, 'mine.py:score' now"):
        go_on(saved(tmp_path, *FOREIGN), "model.trust_remote_code=true", "+plugins.function.path=mine.py:score")


def test_what_runs_no_code_needs_no_words():
    assert code_keys(compose([])) == {} and code_keys(compose(["model.allow_pickle=true"])) == {
        "model.allow_pickle": True
    }


def reward_file(folder):
    """A file of the user's; -> the command that uses it."""
    folder.mkdir()
    (folder / "share.py").write_text("def score(text):\n    return sum(c.isdigit() for c in text) / 10\n")
    return [*SMALL[:-1], f"plugins.function.path={folder / 'share.py'}:score"]


def test_a_changed_reward_file_is_refused_unless_agreed_to(tmp_path, capsys):
    small = reward_file(tmp_path / "code")
    train(tmp_path / "run", "steps=1", small=small)
    resume = f"resume={tmp_path / 'run'}"
    with (tmp_path / "code" / "share.py").open("a") as stream:
        stream.write("# another\n")
    with pytest.raises(
        UserError, match=r"not the code that .* was trained with: plugin 'function'\n(?s:.*)resume_changed=true"
    ):
        train(tmp_path / "run", "steps=2", resume, small=small)
    train(tmp_path / "run", "steps=2", resume, "resume_changed=true", small=small)
    assert "goes on with the changed plugin 'function'" in capsys.readouterr().err
    words = [resume, f"+{small[-1]}", "steps=3"]
    assert training_job(compose(words), words, str(tmp_path / "new")) == 0  # what it was saved with is what there is
    shutil.rmtree(tmp_path / "code")
    reward_file(tmp_path / "code")
    with pytest.raises(UserError, match="not the code"):  # an agreement holds once
        words = [resume, f"+{small[-1]}", "steps=4"]
        training_job(compose(words), words, str(tmp_path / "new"))


def test_other_sources_and_packages_than_at_the_start(tmp_path, capsys):
    """Plugins and tasks: refused. Packages: a notice."""
    train(tmp_path / "run", "steps=1")
    manifest = tmp_path / "run" / "checkpoints" / "step-00000001" / "manifest.json"
    content = json.loads(manifest.read_text())
    resume = ["steps=2", f"resume={tmp_path / 'run'}"]
    for change in (("plugins", "grpo"), ("data",)):
        other = json.loads(json.dumps(content))
        row = other
        for key in change:
            row = row[key]
        row["sha256"] = "0"
        _rewrite(manifest, other)
        with pytest.raises(
            UserError, match="not the code.*: " + ("plugin 'grpo'" if change[0] == "plugins" else "task 'arithmetic'")
        ):
            train(tmp_path / "run", *resume)
    content["versions"]["torch"] = "1.0"
    _rewrite(manifest, content)
    train(tmp_path / "run", *resume, "update.logits_chunk=7")
    said = capsys.readouterr().err
    assert "packages differ from the start of the run: torch 1.0 then" in said
    assert "update.logits_chunk changed: the same mathematics, but other last bits" in said


def _rewrite(manifest, content):
    """The file and its checksum."""
    import hashlib

    manifest.write_text(json.dumps(content))
    checksums = manifest.with_name("checksums.json")
    seal = json.loads(checksums.read_text())
    text = manifest.read_bytes()
    seal["files"]["manifest.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    checksums.write_text(json.dumps(seal))


def test_a_moved_model_goes_on_and_another_reference_is_refused(tmp_path):
    """The reference is the policy of the start, which no checkpoint holds: it is recognised by hash, wherever it lies."""
    small = [item for item in SMALL if not item.startswith("model.")]
    train(tmp_path / "first", "steps=1")
    train(tmp_path / "second", "steps=1", "seed=1")
    options = ["plugins.grpo.kl_coef=0.1"]
    shutil.copytree(tmp_path / "first" / "model", tmp_path / "a")
    train(tmp_path / "straight", *options, "steps=3", f"model.path={tmp_path / 'a'}", small=small)
    train(tmp_path / "run", *options, "steps=2", f"model.path={tmp_path / 'a'}", small=small)
    (tmp_path / "a").rename(tmp_path / "b")
    resume = ["steps=3", f"resume={tmp_path / 'run'}"]
    with pytest.raises(UserError, match="the reference of model=.*second.*are not those.*\n.*resume_changed=true"):
        train(tmp_path / "run", *options, *resume, f"model.path={tmp_path / 'second' / 'model'}", small=small)
    train(tmp_path / "run", *options, *resume, f"model.path={tmp_path / 'b'}", small=small)
    assert digest(tmp_path / "run") == digest(tmp_path / "straight")


def test_the_advice_of_an_error_can_be_followed(tmp_path):
    """A prompt that is too long ends a run; the bound that the message names may be raised on resume."""
    train(tmp_path / "straight", "steps=2")
    train(tmp_path / "run", "steps=1")
    resume = [f"resume={tmp_path / 'run'}", "steps=2"]
    with pytest.raises(UserError, match="set max_prompt_length=6"):
        train(tmp_path / "run", *resume, "max_prompt_length=2")
    train(tmp_path / "run", *resume, "max_prompt_length=6", "eval.every=1", "reward_timeout=3")
    assert digest(tmp_path / "run") == digest(tmp_path / "straight")
