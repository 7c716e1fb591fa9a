"""The command line: what it answers, how fast, and what it says about mistakes."""

import errno
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import yaml
from commands import TINY, Answer, grpozoo, seconds

from grpozoo.cli.main import _job, main
from grpozoo.cli.train import Done
from grpozoo.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """A working directory that is not the checkout."""
    return tmp_path


@pytest.fixture
def typed(folder, monkeypatch, capsys):
    """A function: arguments -> what the main program answers, in this process (torch is imported once for all)."""

    def run(*arguments):
        monkeypatch.chdir(folder)
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
        monkeypatch.setattr("sys.argv", ["grpozoo", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return Answer(stop.value.code or 0, out, err.strip(), [], 0.0)

    return run


def job(answer):
    """The printed configuration."""
    assert answer.status == 0, answer.err
    return yaml.safe_load(answer.out)


@pytest.fixture(scope="module")
def importing_hydra():
    """Seconds of processor time, the least of three."""
    return min(seconds(subprocess.run, [sys.executable, "-c", "import hydra"], check=True)[1] for _ in range(3))


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--cfg", "job"], ["algo=stair"], ["group_sise=4"], ["plugins.grpo.clipp=1"], ["+plugins.stair={}"]],
)
def test_help_configuration_and_unknown_names_need_no_second_and_no_torch(folder, arguments, importing_hydra):
    for _ in range(2):  # the second only where something else on the machine slowed the first
        answer = grpozoo(*arguments, cwd=folder)
        assert not {"torch", "transformers", "accelerate"} & set(answer.heavy)
        # --help takes 1.2 s of processor time where importing Hydra takes 0.2; both take twice as long on a slower machine
        if answer.seconds < 9 * importing_hydra:
            return
    pytest.fail(f"{answer.seconds:.2f} s of processor time, {importing_hydra:.2f} s for importing Hydra")


def test_help_is_a_page_with_groups_everyday_keys_and_the_way_to_all_keys(folder):
    answer = grpozoo("--help", cwd=folder)
    assert answer.status == 0 and len(answer.out.splitlines()) < 45
    for text in ("python -m grpozoo", "algo: ", "reward: ", "prompts_per_step", "--cfg job", "+plugins.NAME={}", "-m "):
        assert text in answer.out
    assert "Hydra" not in answer.out


@pytest.mark.parametrize("arguments, message", [
    (["algo=gradient"], r"unknown choice algo=gradient\navailable: .*\bgrpo\b"),
    (["sampler=idd"], r"unknown choice sampler=idd, did you mean 'iid'\?\navailable: .*\biid\b"),
    (["algo=[grpo,grpp]"], r"unknown choice algo=grpp, did you mean 'grpo'\?"),
    (["group_sise=4"], r"unknown key 'group_sise', did you mean 'group_size'\?"),
    (["modle.kind=tiny"], r"unknown key 'modle\.kind', did you mean 'model\.kind'\?"),
    (["+nonsense=1"], r"unknown section 'nonsense'"),
    (["+update.epocs=1"], r"update: .* has no option 'epocs', did you mean 'epochs'\?"),
    (["plugins.grpo.clipp=1"], r"the plugin 'grpo' \(from grpozoo .*\) has no option 'clipp', did you mean 'clip'\?"),
    (["+plugins.grpo.clipp=1"], r"plugins\.grpo: 'grpo' \(from grpozoo .*\) has no option 'clipp', did you mean 'clip'\?"),
    (["reward=[answer,numeric]", "plugins.numeric.market=x"], r"'numeric' .* has no option 'market', did you mean 'marker'\?"),
    (["+plugins.stair={}"], r"unknown plugin 'stair'.*\navailable: .*\bgrpo\b"),
    (["+plugins.gprpo={}"], r"unknown plugin 'gprpo', did you mean 'grpo'\?"),
    (["~plugins.iids"], r"unknown key 'plugins\.iids', did you mean 'plugins\.iid'\?"),
    (["steps=many"], r"steps: Value 'many' of type 'str' could not be converted to Integer"),
    (["eval.samples=few"], r"eval\.samples: Value 'few' .* could not be converted to Integer"),
    (["plugins.grpo.std=cat"], r"plugins\.grpo\.std: Invalid value 'cat', expected one of \[group, batch, none\]"),
    (["plugins.grpo.clip=wide"], r"plugins\.grpo\.clip: Value 'wide' .* could not be converted to Float"),
    (["plugins.grpo.clip=-1"], r"plugins\.grpo: clip is at least 0, got -1"),
    (["steps=0"], r"steps is at least 1, got 0"),
    (["sampling.top_p=2"], r"sampling\.top_p lies in \(0, 1\], got 2"),
    (["temperature=0"], r"temperature=0 is greedy: .*group_size=1"),
    (["model.width=30"], r"model\.width 30 must be a multiple of model\.heads 4"),
    (["eval.ks=[16]"], r"eval\.ks lie in 1\.\.eval\.samples = 8, got \[16\]"),
    (["reward=function"], r"plugins\.function\.path has no value: set plugins\.function\.path=\.\.\."),
    (["+engine@second=hf"], r"^\+engine@second=hf: each choice has its place .*\nwrite engine=hf, without @$"),
    (["engine=[native,hf]"], r"hf and native both replace generate\(\): keep one, drop the other with ~plugins\.NAME"),
    (["~plugins.iid"], r"no plugin answers token_sampler\(\)"),
    (["~plugins.answer"], r"no reward: choose one with reward=NAME"),
    (["reward=[answer,overlong]", "plugins.overlong.cache=100"], r"plugins\.overlong\.cache = 100 tokens is more than the longest completion, 64"),
    (["+algo=grpo"], r"algo is chosen already: write algo=grpo, without \+ \(algo=\[a,b\] chooses several\)"),
    (["++reward=[answer,format]"], r"reward is chosen already: write reward=\[answer,format\], without \+"),
    (["~algo"], r"~algo: a group is not switched off\nwrite algo=grpo, its default"),
    (["~task=arithmetic"], r"~task: a group is not switched off\nwrite task=arithmetic"),
    (["algo@x=gspo"], r"algo@x=gspo: .*\nwrite algo=gspo, without @"),
    (["algo=gspo", "algo=dapo"], r"algo is chosen 2 times, .*\nwrite algo=\[gspo,dapo\]"),
    (["algo=[gspo,stare]", "lr=1e-3", "algo=dapo"], r"algo is chosen 2 times, .*\nwrite algo=\[gspo,stare,dapo\]"),
    (["-m", "algo=gspo,grpo", "algo=dapo"], r"algo is chosen 2 times"),
    (["algo=[gspo,stare,gspo]"], r"algo=\[gspo,stare,gspo\] names gspo twice\nwrite algo=\[gspo,stare\]"),
    (["-m", "algo=[gspo,gspo],grpo"], r"algo=\[gspo,gspo\] names gspo twice\nwrite algo=gspo"),
    (["algo=5"], r"algo: a choice is a name, or several as algo=\[a,b\]; got 5\navailable: .*gspo"),
    (["task=null"], r"task: a choice is a name, .*got null\navailable: arithmetic"),
    (["experiment=null"], r"experiment: a choice is a name"),
    (["plugins=null"], r"^plugins is a section, got null\nset its keys, plugins\.KEY=VALUE"),
    (["plugins=5"], r"^plugins is a section, got 5"),
    (["~plugins"], r"^plugins is a section, got null"),
    (["update=null"], r"^update is a section, got null"),
    (["checkpoint=0"], r"^checkpoint is a section, got 0"),
    (["plugins.grpo=0"], r"^plugins\.grpo is a section of options, got 0"),
    (["=5"], r"the argument '=5' has no key\nwrite KEY=VALUE"),
    (["seed=1000000000000000000000"], r"^seed is a whole number of 64 bits, -2\*\*63 to 2\*\*63 - 1, got 1000000000000000000000$"),
    (["temperature=inf"], r"^temperature is a finite number, got inf$"),
    (["plugins.grpo.clip=nan"], r"^plugins\.grpo\.clip is a finite number, got nan$"),
    (["optim.betas=[0.9,nan]"], r"^optim\.betas\[1\] is a finite number, got nan$"),
    (["task.answer_after=####"], r"cannot read the argument 'task\.answer_after=####'\n.*quotes.*\"task\.answer_after='####'\""),
    (["--cfg", "jobs"], r"argument --cfg/-c: invalid choice: 'jobs' .*\nflags: --help"),
    (["lr=1", "--cfg"], r"argument --cfg/-c: expected one argument"),
    (["run_dir=/dev/null/x"], r"run_dir: /dev/null/x cannot be written to: Not a directory\nchoose another folder with run_dir=FOLDER"),
    (["+seed=1"], r"seed is there already: change it without \+"),
    (["algo=[grpo"], r"cannot read the argument 'algo=\[grpo'"),
    (["plugin"], r"cannot read the argument 'plugin', did you mean 'plugins'\?"),
    (["--cfgg"], r"unknown flag --cfgg, did you mean '--cfg'\?"),
])  # fmt: skip
def test_a_mistake_gets_one_short_message_and_status_1(typed, folder, arguments, message):
    answer = typed(*arguments)
    assert answer.status == 1
    assert re.search(message, answer.err), answer.err
    assert len(answer.err.splitlines()) <= 4
    assert (
        "Traceback" not in answer.err
        and "HYDRA_FULL_ERROR" not in answer.err
        and "Error executing job" not in answer.err
    )
    assert answer.out == ""
    assert not list(folder.iterdir())  # not even an empty run folder


def test_a_data_set_smaller_than_one_batch_names_the_cause_before_a_model_is_loaded(typed, folder, monkeypatch):
    monkeypatch.setattr("grpozoo.models.load", lambda *_: pytest.fail("a model is loaded"))
    (folder / "few.jsonl").write_text("".join(f'{{"prompt": "say {i}", "answer": "{i}"}}\n' for i in range(5)))
    answer = typed("task=jsonl", "task.path=few.jsonl", "prompts_per_step=50")
    assert answer.status == 1 and len(answer.err.splitlines()) <= 4 and "Traceback" not in answer.err
    assert re.search(r"prompts", answer.err) and "50" in answer.err


@pytest.mark.parametrize("arguments", [["algo=stair"], ["plugins.grpo.std=cat"], ["check", "grpp"]])
def test_a_mistake_in_a_process_of_its_own_ends_with_status_1_and_no_traceback(folder, arguments):
    answer = grpozoo(*arguments, cwd=folder)
    assert answer.status == 1 and answer.out == "" and 1 <= len(answer.err.splitlines()) <= 4
    assert "Traceback" not in answer.err and "Error executing job" not in answer.err


def test_a_flag_stands_anywhere(typed):
    answer = job(typed("seed=7", "--cfg", "job", "steps=3"))
    assert (answer["seed"], answer["steps"]) == (7, 3)


def test_a_run_folder_beside_the_resumed_one_is_refused(typed, folder, monkeypatch):
    there = folder / "there"
    monkeypatch.setattr("grpozoo.run.checkpoint.resolve", lambda *_: (there, None))
    monkeypatch.setattr("grpozoo.cli.train.start", lambda *_: 0)
    answer = typed("resume=there", "run_dir=elsewhere")
    assert answer.status == 1 and not there.exists()
    assert "resume=there goes on in its own folder, and run_dir=elsewhere is another\ndrop run_dir" in answer.err
    assert typed("resume=there", "run_dir=there").status == 0


def test_a_full_disk_or_a_missing_right_is_a_sentence(typed, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr("grpozoo.cli.train.start", full)
    answer = typed("run_dir=mine")
    assert answer.status == 1 and answer.err.startswith("metrics.jsonl: No space left on device\n"), answer.err


def test_one_value_said_twice_is_no_contradiction(typed):
    assert job(typed("--cfg", "job", "lr=0.5", "lr=0.5"))["lr"] == 0.5


@pytest.fixture
def jobs(typed, monkeypatch):
    """The main program with a training that answers lr, or fails where seed is 1; files land where a run's do."""

    def run(composed, words, folder):
        if composed.seed == 1:
            raise UserError("seed 1 fails\nalways")
        where = Path(composed.run_dir or folder)
        where.mkdir(parents=True, exist_ok=True)
        (where / "summary.json").write_text(json.dumps({"heldout_accuracy": {"end": composed.lr}}))
        return Done(0, where)

    monkeypatch.setattr("grpozoo.cli.train.run", run)
    return typed


def test_a_sweep_names_the_jobs_that_failed_and_ends_with_status_1(jobs, folder):
    answer = jobs("-m", "seed=0,1,2", "hydra.sweep.dir=sweep")
    assert answer.status == 1 and "Traceback" not in answer.err
    assert re.search(r"1 job of the sweep failed \(.*sweep\)\n  1  seed=1  seed 1 fails$", answer.err), answer.err
    assert sorted(path.parent.name for path in folder.rglob("summary.json")) == ["0", "2"]
    assert jobs("-m", "seed=0,2", "hydra.sweep.dir=sweep").status == 0  # what failed before is forgotten
    assert jobs("seed=0").status == 0


@pytest.mark.parametrize("lr, expected", [(0.25, 0.25), ("null", math.nan)])
def test_a_job_answers_its_held_out_accuracy(jobs, monkeypatch, lr, expected):
    answers = []
    monkeypatch.setattr(
        "grpozoo.cli.main._job", lambda composed, whole=_job: answers.append(whole(composed)) or answers[-1]
    )
    assert jobs("-m", f"lr={lr}", "seed=0").status == 0
    assert answers == [pytest.approx(expected, nan_ok=True)]


def test_the_run_folder_is_made_when_a_run_starts_and_nowhere_else(jobs, folder):
    jobs("run_dir=mine")
    assert [path.name for path in folder.iterdir()] == ["mine"]
    jobs("-m", "seed=0", "run_dir=other", "hydra.sweep.dir=sweep")
    assert not (folder / "sweep" / "0").exists() and (folder / "other").is_dir()
    jobs("seed=0")
    assert len(list(folder.glob("runs/*-*-*/*-*-*-*/summary.json"))) == 1
    jobs("seed=0", "hydra.run.dir=there")
    assert (folder / "there" / "summary.json").exists()


@pytest.mark.parametrize("launcher", ["joblib"])
def test_a_job_that_fails_in_another_process_fails_the_sweep(typed, folder, launcher):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher}_launcher")
    arguments = ["-m", "plugins.grpo.clip=-1,-2", f"hydra/launcher={launcher}", "hydra.sweep.dir=sweep"]
    answer = typed(*arguments)
    assert answer.status == 1 and "Traceback" not in answer.err
    assert re.search(
        r"2 jobs of the sweep failed .*\n  0  .*clip=-1 .*got -1.*\n  1  .*clip=-2 .*got -2", answer.err
    ), answer.err


@pytest.mark.slow  # importing optuna takes seconds
def test_optuna_finds_the_learning_rate_of_the_highest_accuracy(jobs, folder):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    choices = ["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.n_trials=4"]
    sampler = ["hydra/sweeper/sampler=grid", "hydra.sweep.dir=sweep"]
    answer = jobs("-m", *choices, *sampler, "lr=1e-4,3e-4,2e-4")
    assert answer.status == 0, answer.err
    found = yaml.safe_load((folder / "sweep" / "optimization_results.yaml").read_text())
    assert found["best_params"] == {"lr": 3e-4} and found["best_value"] == 3e-4


def test_an_unknown_task_kind_names_the_known_ones(typed):
    answer = typed("task.kind=arithmetics")
    assert answer.status == 1 and re.search(r"unknown task 'arithmetics', did you mean 'arithmetic'\?", answer.err), (
        answer.err
    )


def test_lists_bare_plugins_and_removals_compose_in_the_given_order(typed):
    assert list(job(typed("--cfg", "job"))["plugins"]) == ["grpo", "iid", "native", "full", "answer"]
    two = job(typed("--cfg", "job", "algo=[grpo]", "reward=[numeric,answer]", "engine=hf"))
    assert list(two["plugins"]) == ["grpo", "iid", "hf", "full", "numeric", "answer"]
    bare = job(typed("--cfg", "job", "+plugins.overlong={}", "~plugins.answer"))
    assert list(bare["plugins"]) == ["grpo", "iid", "native", "full", "overlong"]


def test_a_plugins_option_is_changed_without_plus(typed):
    answer = job(typed("--cfg", "job", "plugins.grpo.clip_high=0.28", "lr=1e-3", "eval.ks=[1,2]"))
    assert answer["plugins"]["grpo"]["clip_high"] == 0.28 and answer["lr"] == 1e-3 and answer["eval"]["ks"] == [1, 2]


@pytest.mark.parametrize("tool", ["plugins", "check", "explain", "warm-start"])
def test_each_tool_answers_help(folder, tool):
    answer = grpozoo(tool, "--help", cwd=folder)
    assert answer.status == 0 and answer.out.startswith(f"grpozoo {tool}") and "torch" not in answer.heavy


def test_plugins_lists_distribution_hooks_with_kinds_and_options(typed):
    answer = typed("plugins", "grpo", "iid")
    assert answer.status == 0
    assert re.search(
        r"grpo  \(grpozoo [\d.]+\)\n    GRPO: group relative.*\n    hooks: advantage \(one\), .*regularizer \(sum\)\n    options: std, ddof",
        answer.out,
    )
    assert re.search(r"iid  \(grpozoo .*\n.*\n    hooks: token_sampler \(one\)\n    options: none", answer.out)


@pytest.mark.parametrize("arguments, message", [
    (["check"], "check needs the name of a plugin"),
    (["check", "grpp"], "unknown plugin 'grpp', did you mean 'grpo'?"),
    (["plugins", "grpp"], "unknown plugin 'grpp', did you mean 'grpo'?"),
    (["explain", "nowhere"], "nowhere is not a run folder"),
    (["warm-start", "task.levle=3"], "unknown key 'task.levle', did you mean 'task.level'?"),
])  # fmt: skip
def test_a_mistake_in_a_tool_gets_one_short_message(typed, arguments, message):
    answer = typed(*arguments)
    assert (
        answer.status == 1
        and message in answer.err
        and "Traceback" not in answer.err
        and len(answer.err.splitlines()) <= 4
    )


def test_check_runs_the_kit_and_says_what_passed(typed):
    answer = typed("check", "overlong", "reward=[answer,overlong]")
    assert answer.status == 0 and re.match(r"overlong \(grpozoo .*\) passes \d+ checks: composes, .*reward", answer.out)


def test_explain_metrics_lists_the_cores_and_the_plugins_metrics(typed):
    answer = typed("explain", "metrics")
    assert answer.status == 0 and "heldout/accuracy" in answer.out and "grpo/ratio_clipped_low" in answer.out


def swept(folder, *arguments):
    """Exit status and output of `python -m grpozoo -m` in a process of its own."""
    process = processes.start(["-m", *arguments, *TINY, "hydra.sweep.dir=sweep"], folder, HYDRA_FULL_ERROR="0")
    process.join(300)
    return process.exitcode, (folder / "log-0.txt").read_text()


@pytest.mark.slow
def test_multirun_trains_every_combination_from_any_directory(folder):
    status, said = swept(folder, "seed=0,1", "algo=grpo")
    assert status == 0, said
    assert sorted(path.parent.name for path in folder.glob("sweep/*/summary.json")) == ["0", "1"]
    seeds = {yaml.safe_load((folder / "sweep" / number / "config.yaml").read_text())["seed"] for number in "01"}
    assert seeds == {0, 1}


@pytest.mark.slow
def test_a_failing_job_of_a_sweep_does_not_stop_the_others_and_the_status_is_1(folder):
    status, said = swept(folder, "plugins.grpo.clip=-1,0.2")
    assert status == 1 and "clip is at least 0" in said and "Traceback" not in said
    assert [path.parent.name for path in folder.glob("sweep/*/summary.json")] == ["1"]


def test_a_signal_ends_the_sweep_and_not_only_its_job(folder, monkeypatch):
    calls = []
    monkeypatch.setattr("grpozoo.cli.train.run", lambda *_: calls.append(1) or Done(143, folder))
    monkeypatch.setattr("sys.argv", ["grpozoo", "-m", "seed=0,1,2", f"hydra.sweep.dir={folder}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 143 and len(calls) == 1


@pytest.mark.parametrize("world, said", [("1", "done\nshutdown\n"), ("2", "done\n")])
def test_one_of_several_processes_leaves_without_the_interpreters_shutdown(world, said):
    """What was printed arrives, buffered or not, and the status is the run's."""
    code = (
        "import atexit; from grpozoo.cli.main import leave; atexit.register(print, 'shutdown'); print('done'); leave(3)"
    )
    environment = {**os.environ, "WORLD_SIZE": world}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stdout, answer.stderr) == (3, said, "")
