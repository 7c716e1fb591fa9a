"""Your own data: JSONL, CSV or Parquet files with named columns (`task=jsonl task.path=my.jsonl`).

All rows are held in memory; `task=hf task.streaming=true` reads larger sets. CSV cells are text, never numbers.
"""

import csv
import glob
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from grpozoo.errors import UserError
from grpozoo.tasks.rows import Columns, Row, RowTask, check_heldout, check_marks, split, without


class Files(RowTask):
    """Rows of local files."""

    places = frozenset({"path", "heldout_path"})

    @dataclass
    class Config(RowTask.Config):
        path: str = (
            MISSING  # a file, a folder or a pattern such as data/*.jsonl: .jsonl .ndjson .json .csv .tsv .parquet
        )
        heldout: float = 0.1  # below 1: share of the questions; from 1: number of rows, at most
        heldout_path: str | None = None  # files with the held-out rows instead; their questions leave the training set

        def __post_init__(self):
            check_heldout(self.heldout)
            check_marks(self.answer_after, self.answer_before)

    def __init__(self, config: Config):
        super().__init__(config)
        rows = self._rows("path", config.path)
        if config.heldout_path is None:
            self.train, self.heldout = split(rows, config.heldout)
        else:
            heldout = self._rows("heldout_path", config.heldout_path)
            self.train, self.heldout = without(rows, heldout), [row.prompt for row in heldout]

    def _rows(self, option: str, path: str) -> list[Row]:
        table, places = [], []
        for file in _files(option, path):
            rows = list(_read(file))
            table += rows
            places += [f"{file}, row {number}" for number in range(1, len(rows) + 1)]
        if not table:
            raise UserError(f"task.{option}={path} has no rows")
        columns = dict.fromkeys(name for row in table for name in row)  # rows of JSONL need not be alike
        return self.read(Columns(self.config, columns, path), table, places)


def _files(option: str, path: str) -> list[Path]:
    """The files that a path, folder or pattern stands for, in order of their names."""
    allowed = f"allowed: a file, folder or pattern of {', '.join(READERS)}"
    try:
        place = Path(path).expanduser()
        folder = place.is_dir()
        if folder and path:
            found = [file for file in place.rglob("*") if file.suffix.lower() in READERS and file.is_file()]
        else:
            found = [place] if place.is_file() else [Path(file) for file in glob.glob(str(place), recursive=True)]
            found = [file for file in found if file.is_file()] if path else []
    except (OSError, RuntimeError, ValueError) as error:  # names that no file can have, homes that nobody has
        raise UserError(f"task.{option}={_short(path)}: {_short(error)}\n{allowed}") from None
    if not found:
        missing = "the folder holds no such file" if folder and path else f"no such file (looked in {Path.cwd()})"
        raise UserError(f"task.{option}={_short(path)}: {missing}\n{allowed}")
    strange = sorted({file.suffix for file in found if file.suffix.lower() not in READERS})
    if strange:
        raise UserError(
            f"task.{option}={path}: {strange[0] or 'a file without suffix'} is not a format that is read\n"
            f"allowed: {', '.join(READERS)}"
        )
    return sorted(found)


def _short(said: object) -> str:
    text = " ".join(str(said).split()).replace("\0", "\\0")
    return text if len(text) <= 200 else f"{text[:200]}..."


def _read(file: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from READERS[file.suffix.lower()](file)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or _short(error)}") from None


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text with their numbers and ends, the byte order mark taken off."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if b"\0" in line:
                raise UserError(
                    f"{file}:{number}: not text, it has a NUL byte: is it binary, or UTF-16? Save it as UTF-8"
                )
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                found = f"byte 0x{line[error.start]:02x} at place {error.start + 1}"
                raise UserError(f"{file}:{number}: not UTF-8 text ({found}): save it as UTF-8") from None


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    for number, line in _lines(file):
        if line.strip():
            yield _object(_parse(line, f"{file}:{number}"), f"{file}:{number}")


def _json(file: Path) -> Iterator[dict[str, Any]]:
    """One list of objects, or JSONL under the shorter suffix."""
    text = "".join(line for _, line in _lines(file))
    if not text.lstrip().startswith("["):
        yield from _json_lines(file)
        return
    for number, row in enumerate(_parse(text, str(file)), start=1):
        yield _object(row, f"{file}, item {number}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError(f"{where}: JSON that is nested too deeply to be read") from None
    except ValueError as error:  # a mistake in JSON, or a number of thousands of digits
        raise UserError(f"{where}: not JSON: {_short(error)}") from None


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row is an object {{column: value}}, got {type(row).__name__}")
    return row


def _csv(file: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    lines = (part for _, line in _lines(file) for part in re.split(r"(?<=\r)(?!\n)", line) if part)
    rows = csv.DictReader(lines, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
    try:
        names = rows.fieldnames or []
        _check_names(names, file)
        for row in rows:
            if None in row or None in row.values():
                where = f"{file}:{rows.line_num}"
                raise UserError(f"{where}: the row does not have the {len(names)} cells of the header")
            yield row
    except csv.Error as error:
        raise UserError(f"{file}:{rows.line_num + 1}: not CSV: {error}") from None  # the line is not counted yet


def _check_names(names: Sequence[str], file: Path) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(f"{file}: two columns have one name: {_short(', '.join(map(repr, twice)))}")


def _parquet(file: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    with open(file, "rb"):  # whether it may be read at all is said by the caller
        pass
    try:
        with ParquetFile(file) as table:
            _check_names(table.schema_arrow.names, file)
            for batch in table.iter_batches():
                yield from batch.to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError) as error:  # what a damaged file can raise
        raise UserError(f"{file}: not Parquet, or damaged: {_short(error)}") from None


READERS = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
