"""Runs in processes of their own, without the seconds in which each imports torch and transformers.

The processes are forked from a server that has imported both and has done nothing else: one thread, no accelerator state.
"""

import multiprocessing
import os
import socket
import sys

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["grpozoo.loop", "grpozoo.cli.train", "transformers.models.qwen3.modeling_qwen3", "torch._dynamo"]
)


def grpozoo(*arguments):
    """`python -m grpozoo ARGUMENTS`."""
    from grpozoo.cli.main import main

    sys.argv = ["grpozoo", *map(str, arguments)]
    main()


def _run(program, arguments, folder, environment):
    import torch

    os.chdir(folder)
    os.environ.update(environment, TRANSFORMERS_VERBOSITY="error")
    torch.set_num_threads(1)
    log = os.open(f"log-{environment.get('RANK', 0)}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    program(*arguments)


def start(arguments, folder, program=grpozoo, **environment):
    """program(*arguments) in `folder` -> a multiprocessing.Process; it prints into folder/log-RANK.txt."""
    process = CONTEXT.Process(target=_run, args=(program, arguments, folder, environment), daemon=True)
    process.start()
    return process


def two(arguments, folder, program=grpozoo, timeout=240):
    """The same as two processes of one run, as a launcher starts them; both must end well."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    processes = [start(arguments, folder, program, RANK=rank, LOCAL_RANK=rank, **common) for rank in "01"]
    for process in processes:
        process.join(timeout)
    status = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert status == [0, 0], "\n".join((folder / f"log-{rank}.txt").read_text()[-3000:] for rank in "01")
