"""Commands as a user types them, each in a process of its own."""

import os
import resource
import subprocess
import sys
from dataclasses import dataclass

HEAVY = ("torch", "transformers", "accelerate", "datasets", "numpy")
PROGRAM = """
import sys
from grpozoo.cli.main import main
try:
    main()
finally:
    sys.stderr.flush()
    print("HEAVY", *[name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
"""
TINY = [  # a run of two steps on random weights
    "model.warm_start=false", "model.layers=1", "model.width=16", "model.heads=2", "eval.every=0", "eval.prompts=8",
    "eval.samples=0", "task.train=400", "task.heldout=40", "steps=2", "prompts_per_step=2", "group_size=2", "max_completion_length=8", "logger=files",
]  # fmt: skip


@dataclass
class Answer:
    """What a command printed and cost."""

    status: int
    out: str
    err: str
    heavy: list[str]  # imported packages among HEAVY
    seconds: float  # of processor time, so that a busy machine does not matter


def seconds(command, *arguments, **options):
    """What command(...) answers, and the processor time of the processes that it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = command(*arguments, **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return answer, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def grpozoo(*arguments, cwd=None, timeout=120, **environment):
    """The main program with the given arguments; `environment` is added to this process's."""
    process, spent = seconds(
        subprocess.run,
        [sys.executable, "-c", PROGRAM.format(heavy=HEAVY), *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    err, _, heavy = process.stderr.rpartition("HEAVY")
    return Answer(process.returncode, process.stdout, err.strip(), heavy.split(), spent)
