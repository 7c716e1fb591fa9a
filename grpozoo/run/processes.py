"""The processes of a run: what they tell each other, and how they are asked to stop."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from grpozoo.rewards.asking import collective


class Processes:
    """Rollouts and rewards are whole in every process; only work is divided. With one process all answers are local."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        self.main = accelerator.is_main_process
        self.device = accelerator.device

    @collective
    def gather(self, parts: list) -> list:
        """Concatenate lists over the processes, in the order of their ranks."""
        return gather_object(parts) if self.world > 1 else parts

    @collective
    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add a CPU tensor up over the processes."""
        if self.world == 1:
            return values
        return self.accelerator.reduce(values.to(self.device), reduction="sum").cpu()

    @collective
    def sum_gradients(self, parameters: list[torch.Tensor]) -> None:
        """Add up the gradients of all processes; their losses already share one denominator."""
        if self.world == 1:
            return
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        total = self.accelerator.reduce(flat, reduction="sum")
        start = 0
        for parameter in parameters:
            parameter.grad.copy_(total[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()

    def told(self, message: list) -> list:
        """The main process's message, a list of as many objects in every process."""
        if self.world > 1:
            broadcast_object_list(message)
        return message


class Interruption:
    """SIGINT and SIGTERM ask for a stop after the current optimizer step; a second one stops at once."""

    def __init__(self, processes: Processes, tell: Callable[[str], None]):
        self.processes, self.tell = processes, tell
        self.signals: list[int] = []  # received

    def asked(self) -> bool:
        """Whether any process was told to stop."""
        if self.processes.world == 1:
            return bool(self.signals)
        return bool(self.processes.sum(torch.tensor(float(bool(self.signals)))))

    @contextmanager
    def heard(self) -> Iterator[None]:
        """While this lasts, signals are noted instead of ending the process."""
        before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number, frame) -> None:
        if self.signals:
            raise KeyboardInterrupt
        self.signals.append(number)
        self.tell("stopping after this optimizer step; once more to stop at once")
