"""A data set that the library datasets loads, from its hub or a local folder (`task=hf task.path=org/name`).

With `streaming` nothing is downloaded in advance and the training set has no length. Then questions whose hash lies in
the held-out share (5 % if `heldout` is a number of rows) are never trained on. The first `heldout` rows of them (512
if it is a share) are the held-out set: the start reads about 512 / share or 20 heldout rows. A held-out split is read
in full. The order of training is shuffled through a buffer (`grpozoo.compose.task.PromptStream`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from omegaconf import MISSING

from grpozoo.errors import UserError
from grpozoo.tasks.rows import Columns, Row, RowTask, check_heldout, check_marks, split, without
from grpozoo.types import Prompt

STREAM_SHARE = 0.05  # of the questions of a stream, kept for the held-out set
STREAM_HELDOUT = 512  # held-out rows of a stream
STREAM_IDS = 256  # training rows of a stream that its fingerprint covers


class Hub(RowTask):
    """Rows of a data set in the sense of the library datasets."""

    places = frozenset({"path"})

    @dataclass
    class Config(RowTask.Config):
        path: str = MISSING  # org/name on the hub, or a local folder that `datasets.load_dataset` reads
        subset: str | None = None  # configuration of the data set
        split: str = "train"
        revision: str | None = None  # commit, tag or branch of the hub repository
        streaming: bool = False  # read rows as they are needed
        heldout: float = 0.1  # below 1: share of the questions; from 1: number of rows, at most
        heldout_split: str | None = (
            None  # a split with the held-out rows instead; their questions leave the training set
        )

        def __post_init__(self):
            check_heldout(self.heldout)
            check_marks(self.answer_after, self.answer_before)

    def __init__(self, config: Config):
        super().__init__(config)
        source = self._load(config.split)
        if config.streaming:
            self._stream(source)
            return
        rows = self.read(self._columns(source, config.split), source)
        if config.heldout_split is None:
            self.train, self.heldout = split(rows, config.heldout)
        else:
            heldout = self._load(config.heldout_split)
            held = self.read(self._columns(heldout, config.heldout_split), heldout)
            self.train, self.heldout = without(rows, held), [row.prompt for row in held]

    def _stream(self, source: Any) -> None:
        """Set both sides of a set that is read once per epoch, row by row."""
        share = self.config.heldout if self.config.heldout < 1 else STREAM_SHARE
        count = (STREAM_HELDOUT if share else 0) if self.config.heldout < 1 else int(self.config.heldout)
        rows = _Stream(source, self._columns(source, self.config.split))
        if self.config.heldout_split is None:
            held = list(islice((row for row in rows if row.share < share), count))
            self.train = _Training(rows, share, frozenset())
            self.notices = rows.columns.notices()
        else:
            heldout = self._load(self.config.heldout_split)
            held = self.read(self._columns(heldout, self.config.heldout_split), heldout)
            self.train = _Training(rows, 0.0, frozenset(row.share for row in held))
        self.heldout = [row.prompt for row in held]

    def _load(self, split: str) -> Any:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError

        config = self.config
        try:
            return load_dataset(
                config.path, config.subset, split=split, revision=config.revision, streaming=config.streaming
            )
        except (
            OSError,
            ValueError,
            RecursionError,
            DatasetsError,
        ) as error:  # what is missing, unreachable or unknown, in the library's words
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UserError(
                f"task.path={config.path} (subset {config.subset}, split {split}) does not load: {reason}"
            ) from None

    def _columns(self, source: Any, split: str) -> Columns:
        names = source.column_names or list(next(iter(source), {}))  # a stream may not know its columns
        if not names:
            raise UserError(f"task.path={self.config.path}, split {split}, has no rows")
        return Columns(self.config, names, f"{self.config.path}, split {split}")

    def _fingerprint_ids(self) -> Iterator[str]:
        """Of a stream: its held-out rows and its first training rows."""
        if not self.config.streaming:
            yield from super()._fingerprint_ids()
            return
        yield from (prompt.id for prompt in self.heldout)
        yield from (prompt.id for prompt in islice(self.train, STREAM_IDS))


class _Stream:
    """The rows of a streaming set, from the first one each time; the number of a row tells equal rows apart."""

    def __init__(self, source: Any, columns: Columns):
        self.source, self.columns = source, columns

    def __iter__(self) -> Iterator[Row]:
        for number, row in enumerate(self.source):
            yield self.columns.read(row, number, f"{self.columns.where}, row {number + 1}")


class _Training:
    """The prompts of a stream that are not held out."""

    def __init__(self, rows: _Stream, share: float, shares: frozenset[float]):
        self.rows, self.share, self.shares = rows, share, shares

    def __iter__(self) -> Iterator[Prompt]:
        return (row.prompt for row in self.rows if row.share >= self.share and row.share not in self.shares)
