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


def _main(arguments, folder, environment):
    import torch

    from grpozoo.cli.main import main

    os.chdir(folder)
    os.environ.update(environment, TRANSFORMERS_VERBOSITY="error")
    torch.set_num_threads(1)
    sys.argv = ["grpozoo", *arguments]
    log = os.open(f"log-{environment.get('RANK', 0)}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    main()


def start(arguments, folder, **environment):
    """`python -m grpozoo ARGUMENTS` in `folder` -> a multiprocessing.Process; it prints into folder/log-RANK.txt."""
    process = CONTEXT.Process(target=_main, args=(list(map(str, arguments)), str(folder), environment), daemon=True)
    process.start()
    return process


def two(arguments, folder, timeout=240):
    """The same as two processes of one run, as a launcher starts them; both must end well."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = [
        start(
            arguments,
            folder,
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="localhost",
            MASTER_PORT=port,
        )
        for rank in ("0", "1")
    ]
    for process in processes:
        process.join(timeout)
    status = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert status == [0, 0], "\n".join((folder / f"log-{rank}.txt").read_text()[-3000:] for rank in (0, 1))
