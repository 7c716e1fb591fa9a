"""The warm start: what is trained on, that it repeats bit for bit, where it is kept, and what ships."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpozoo import Prompt, UserError, models
from grpozoo.compose.task import load_task
from grpozoo.config import Model
from grpozoo.models import warm_start
from grpozoo.models.warm_start import Recipe
from grpozoo.tasks import Task
from grpozoo.tasks.arithmetic import Arithmetic

SMALL = Model(layers=1, width=16, heads=2)
QUICK = Recipe(rows=8, max_steps=5, every=5, probe=4, warmup=2, cooldown=2)


class Echo(Task):
    """`ab=` is answered `ab`."""

    @dataclass
    class Config:
        size: int = 40
        careless: float = 0.0

    def __init__(self, config):
        super().__init__(config)
        texts = [chr(97 + i % 26) + chr(97 + i // 26) for i in range(config.size)]
        prompts = [Prompt(f"e{i}", text=f"{text}=", answer=text) for i, text in enumerate(texts)]
        self.train, self.heldout = prompts[:-8], prompts[-8:]

    def verify(self, prompt, completion):
        return float(completion == prompt.answer)

    def solution(self, prompt):
        wrong = int(prompt.id[1:]) < self.config.careless * len(self.train)
        return "wrong" if wrong else prompt.answer


class Unsolved(Echo):
    def solution(self, prompt):
        return None


@pytest.fixture
def task():
    return Echo(Echo.Config())


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPOZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_the_loss_covers_solution_and_end_token_only(task):
    ids, labels = next(warm_start._batches(task, models.tiny_tokenizer(), replace(QUICK, rows=3)))
    assert ids.shape == (3, 6)  # a b = a b <eos>
    assert (labels[:, :3] == -100).all()
    assert torch.equal(labels[:, 3:5], ids[:, :2])
    assert (labels[:, 5] == 0).all()


def test_padding_does_not_enter_the_loss(task):
    model, tokenizer = models.tiny_model(SMALL), models.tiny_tokenizer()
    ids, labels = next(warm_start._batches(task, tokenizer, replace(QUICK, rows=3)))
    wider = (torch.nn.functional.pad(ids, (0, 4)), torch.nn.functional.pad(labels, (0, 4), value=-100))
    expected = warm_start._loss(model, ids, labels).item()
    assert warm_start._loss(model, *wider).item() == pytest.approx(expected, abs=1e-6)


def test_every_training_prompt_is_seen_once_per_round(task):
    source = warm_start._examples(task, seed=0)
    first, second = ([next(source).id for _ in task.train] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(prompt.id for prompt in task.train)
    assert first != second


def test_two_trainings_give_the_same_bytes_whatever_the_threads_and_the_global_seed(task, tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    before = torch.get_num_threads()
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        torch.set_num_threads(1 + seed)
        warm_start.train(SMALL, task, folder, QUICK)
    torch.set_num_threads(before)
    assert weights(folders[0]) == weights(folders[1])
    assert (folders[0] / "recipe.json").read_text() == (folders[1] / "recipe.json").read_text()


def test_training_stops_at_its_target(task, tmp_path):
    recipe = replace(QUICK, rows=32, max_steps=200, every=10, lr=1e-2, careless=0.0, target=0.2, probe=8, cooldown=20)
    result = warm_start.train(replace(SMALL, width=32), task, tmp_path, recipe)
    assert result["steps"] < 200
    assert result["sampled"] >= 0.2


@pytest.mark.parametrize("cooldown", [0, 2, 4, 150])
def test_training_ends_at_max_steps_with_a_measured_accuracy(task, tmp_path, cooldown, monkeypatch):
    monkeypatch.setattr(warm_start, "accuracy", lambda *_: {"greedy": 0.25, "sampled": 0.125})
    result = warm_start.train(SMALL, task, tmp_path, replace(QUICK, cooldown=cooldown))
    assert result == {"steps": 5, "greedy": 0.25, "sampled": 0.125}


def test_a_training_goes_on_from_another_ones_weights(task, tmp_path):
    """With nothing left to do (lr=0) they stay as they are, and the record says where they come from."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    warm_start.train(SMALL, task, tmp_path / "first", QUICK)
    warm_start.train(SMALL, task, tmp_path / "second", replace(QUICK, lr=0.0, seed=1), tmp_path / "first")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second
    record = json.loads((tmp_path / "second" / "recipe.json").read_text())
    assert record["start"] == json.loads((tmp_path / "first" / "recipe.json").read_text())


def test_a_share_of_what_is_taught_has_bad_habits(task):
    taught = warm_start._teacher(task, replace(QUICK, careless=0.25))
    assert sum(taught.solution(p) == "wrong" for p in task.train) == 8  # of 32
    assert not any(task.solution(p) == "wrong" for p in task.train)


@pytest.mark.parametrize("problem, expected", [
    ("48+47+12", "48+47=85;85+12=97#97"),  # 8 + 7 = 15: the ten is forgotten
    ("48+47+16", "48+47=85;85+16=91#91"),  # and again: 5 + 6 = 11
    ("12+35+41", "12+35=47;47+41=88#88"),  # nothing to carry: right
    ("52-38+10", "52-38=24;24+10=34#34"),  # 2 < 8: nothing is borrowed
])  # fmt: skip
def test_careless_work_forgets_carries_and_borrows(problem, expected):
    made = Arithmetic(Arithmetic.Config(level=3, careless=1.0, train=10, heldout=10))
    assert made.solution(Prompt("p", text=f"{problem}=", extra={"expression": problem})) == expected


def test_ensure_trains_once_and_then_finds_the_folder(task, cache, monkeypatch, capsys):
    folder = warm_start.ensure(SMALL, task, QUICK)
    assert folder.parent == cache
    assert "training them, once" in capsys.readouterr().err
    monkeypatch.setattr(warm_start, "train", lambda *_: pytest.fail("trained a second time"))
    assert warm_start.ensure(SMALL, task, QUICK) == folder
    assert [p for p in cache.iterdir() if p.is_dir()] == [folder]  # nothing half made is left


@pytest.mark.parametrize("change", [
    {"config": replace(SMALL, width=32)},
    {"recipe": replace(QUICK, seed=1)},
    {"teacher": Echo(Echo.Config(size=39))},
    {"teacher": Echo(Echo.Config(careless=0.5))},
])  # fmt: skip
def test_the_key_tells_apart_what_changes_the_weights(task, change):
    arguments = {"config": SMALL, "teacher": task, "recipe": QUICK}
    assert warm_start._key(**arguments) != warm_start._key(**{**arguments, **change})


def test_the_key_ignores_what_does_not(task):
    other = replace(SMALL, dtype="bfloat16", attention="eager", chat_template=False)
    assert warm_start._key(SMALL, task, QUICK) == warm_start._key(other, Echo(Echo.Config()), QUICK)


def test_a_training_that_fails_leaves_nothing_behind(task, cache, monkeypatch):
    def broken(config, task, folder, recipe):
        (folder / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(warm_start, "train", broken)
    with pytest.raises(KeyboardInterrupt):
        warm_start.ensure(SMALL, task, QUICK)
    assert [p for p in cache.iterdir() if p.is_dir()] == []


def test_a_task_without_solutions_is_refused():
    with pytest.raises(UserError, match="model.warm_start=false"):
        warm_start.ensure(SMALL, Unsolved(Unsolved.Config()), QUICK)


def test_a_cache_that_cannot_be_written_is_a_users_error(task, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRPOZOO_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="GRPOZOO_CACHE"):
        warm_start.ensure(SMALL, task, QUICK)


def test_regenerating_says_whether_the_shipped_weights_came_out(task, tmp_path, monkeypatch):
    monkeypatch.setattr(warm_start, "ASSETS", tmp_path / "assets")
    shipped = tmp_path / "assets" / "echo"
    shipped.mkdir(parents=True)
    warm_start.train(SMALL, task, shipped, QUICK)
    assert warm_start.ensure(SMALL, task, QUICK) == shipped
    folder, result, note = warm_start.regenerate(SMALL, task, QUICK)
    assert folder != shipped and result["steps"] == 5
    assert note.startswith("bit for bit")
    (shipped / "model.safetensors").write_bytes(weights(folder)[:-4] + b"\0\0\0\1")
    assert warm_start.regenerate(SMALL, task, QUICK)[2].startswith("not bit for bit")


def test_accuracy_is_the_verifiers(task):
    """A model that always ends at once solves nothing, one that echoes solves everything."""

    class Oracle:
        def generate(self, input_ids, attention_mask, max_new_tokens, **_):
            return torch.cat([input_ids, input_ids[:, :2], torch.zeros(len(input_ids), 1, dtype=torch.long)], 1)

    class Mute(Oracle):
        def generate(self, input_ids, **_):
            return torch.cat([input_ids, torch.zeros(len(input_ids), 1, dtype=torch.long)], 1)

    arguments = (models.tiny_tokenizer(), task, task.heldout, 4, 0)
    assert warm_start.accuracy(Oracle(), *arguments) == {"greedy": 1.0, "sampled": 1.0}
    assert warm_start.accuracy(Mute(), *arguments) == {"greedy": 0.0, "sampled": 0.0}


# --- what ships


@pytest.fixture(scope="module")
def default_task():
    return load_task({"kind": "arithmetic"})


def test_the_default_task_starts_from_shipped_weights_without_training(default_task, monkeypatch):
    monkeypatch.setattr(warm_start, "train", lambda *_: pytest.fail("trained"))
    folder = warm_start.ensure(Model(), default_task)
    assert folder.parent == warm_start.ASSETS
    assert (folder / "model.safetensors").stat().st_size < 4_000_000
    reloaded, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == reloaded.config.vocab_size


def test_the_shipped_weights_solve_20_to_40_percent_and_leave_room(default_task):
    folder = warm_start.ensure(Model(), default_task)
    result = json.loads((folder / "recipe.json").read_text())["result"]
    assert 0.2 <= result["greedy"] <= 0.4
    model, tokenizer = models.load(Model(), default_task)
    prompts = list(default_task.heldout[:128])
    measured = warm_start.accuracy(model, tokenizer, default_task, prompts, 40, seed=0)
    assert 0.15 <= measured["greedy"] <= 0.45  # 128 problems: two standard errors of 0.3 are 0.08
    assert 0.1 <= measured["sampled"] <= 0.5  # enough right answers to learn from
