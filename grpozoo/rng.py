"""Counter-based random streams. A stream is named by what it is for, so nobody can disturb anybody else's numbers.

The key (seed, purpose, step, prompt id, ...) alone decides the numbers: not the process, not the order of calls,
not how often a run was evaluated, resumed or split. Nothing needs to be saved or handed between processes.
"""

from hashlib import blake2b

import numpy as np


def key(*parts: object) -> int:
    """128-bit key of a tuple of strings and integers."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")


def stream(seed: int, *parts: object) -> np.random.Generator:
    """The generator of (seed, purpose, ...): `stream(seed, "order", epoch)`."""
    return np.random.Generator(np.random.Philox(key=key(int(seed), *parts)))
