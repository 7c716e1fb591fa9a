"""Your own data: JSONL, CSV or Parquet files with named columns (`task=jsonl task.path=my.jsonl`).

All rows are held in memory; `task=hf task.streaming=true` reads larger sets. CSV cells are text, never numbers.
"""

import csv
import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from grpozoo.errors import UserError
from grpozoo.tasks.rows import Columns, Row, RowTask, check_heldout, split, without


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

    def __init__(self, config: Config):
        super().__init__(config)
        rows = self._rows("path", config.path)
        if config.heldout_path is None:
            self.train, self.heldout = split(rows, config.heldout)
        else:
            heldout = self._rows("heldout_path", config.heldout_path)
            self.train, self.heldout = without(rows, heldout), [row.prompt for row in heldout]

    def _rows(self, option: str, path: str) -> list[Row]:
        table = [row for file in _files(option, path) for row in _read(file)]
        if not table:
            raise UserError(f"task.{option}={path} has no rows")
        columns = dict.fromkeys(name for row in table for name in row)  # rows of JSONL need not be alike
        return self.read(Columns(self.config, columns, path), table)


def _files(option: str, path: str) -> list[Path]:
    """The files that a path, folder or pattern stands for, in order of their names."""
    place = Path(path).expanduser()
    if place.is_dir():
        found = [file for file in place.rglob("*") if file.suffix.lower() in READERS and file.is_file()]
    elif place.is_file():
        found = [place]
    else:
        found = [Path(file) for file in glob.glob(str(place), recursive=True) if Path(file).is_file()]
    if not found:
        raise UserError(
            f"task.{option}={path}: no such file (looked in {Path.cwd()})\n"
            f"allowed: a file, folder or pattern of {', '.join(READERS)}"
        )
    strange = sorted({file.suffix for file in found if file.suffix.lower() not in READERS})
    if strange:
        raise UserError(
            f"task.{option}={path}: {strange[0] or 'a file without suffix'} is not a format that is read\n"
            f"allowed: {', '.join(READERS)}"
        )
    return sorted(found)


def _read(file: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from READERS[file.suffix.lower()](file)
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text: {error}") from None


def _json_lines(file: Path) -> Iterator[dict[str, Any]]:
    with open(file, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _object(_parse(line, f"{file}:{number}"), f"{file}:{number}")


def _json(file: Path) -> Iterator[dict[str, Any]]:
    """One list of objects, or JSONL under the shorter suffix."""
    text = file.read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):
        yield from _json_lines(file)
        return
    for number, row in enumerate(_parse(text, str(file)), start=1):
        yield _object(row, f"{file}, item {number}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error}") from None


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row is an object {{column: value}}, got {type(row).__name__}")
    return row


def _csv(file: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    with open(file, encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            names = rows.fieldnames or []
            if len(set(names)) < len(names):
                raise UserError(f"{file}: two columns have one name: {', '.join(names)}")
            for row in rows:
                if None in row or None in row.values():
                    where = f"{file}:{rows.line_num}"
                    raise UserError(f"{where}: the row does not have the {len(names)} cells of the header")
                yield row
        except csv.Error as error:
            raise UserError(f"{file}:{rows.line_num + 1}: not CSV: {error}") from None  # the line is not counted yet


def _parquet(file: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches():
                yield from batch.to_pylist()
    except ArrowException as error:
        raise UserError(f"{file}: not Parquet: {str(error).splitlines()[0]}") from None


READERS = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
