"""Rows of a data set, from a local file or over the network."""

import csv
import gzip
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.request import urlopen

from specctl.errors import UsageError, pip_install
from specctl.prompts.suite_formats import FormatError, Row, Source, parsed

OFFLINE_HINT = "without a network, read a local copy with --data FILE"
TIMEOUT = 30.0
"""Seconds to wait for the server."""


def local_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Rows of a ``.jsonl``, ``.json`` (one list), ``.csv`` or ``.parquet`` file, each with its number from 1.

    Text files may be gzipped (``.gz``); a file with an unknown ending is read as JSON lines.

    Raises:
        UsageError: the file cannot be read, or its contents do not match its ending.
    """
    kind = (path.with_suffix("") if path.suffix == ".gz" else path).suffix
    if kind == ".parquet":
        yield from enumerate(_fetched(Source("parquet", data_files=str(path)), str(path)), start=1)
        return
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            if kind == ".csv":
                yield from enumerate(csv.DictReader(file), start=1)
            elif kind == ".json":
                yield from enumerate(_json_list(file), start=1)
            else:
                yield from _json_lines(file, path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, ValueError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def fetched_rows(suite: str, source: Source | str) -> Iterator[tuple[int, Row]]:
    """Rows of a suite's public data set, each with its number from 1.

    Raises:
        UsageError: the data set cannot be reached or read, or is on the hub and `datasets` is not installed.
    """
    if isinstance(source, Source):
        yield from enumerate(_fetched(source, f"the suite '{suite}'"), start=1)
        return
    try:
        with urlopen(source, timeout=TIMEOUT) as response:
            yield from _json_lines(map(bytes.decode, response), source)
    except (OSError, HTTPException, UnicodeDecodeError) as error:
        raise UsageError(f"the suite '{suite}' cannot be fetched from {source}: {error}", OFFLINE_HINT) from error


def _json_lines(file: Iterable[str], place: Path | str) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            yield number, parsed(line)
        except FormatError as error:
            raise UsageError(f"{place}:{number}: {error}") from error


def _json_list(file: IO[Any]) -> list[Row]:
    rows = json.load(file)
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise FormatError("it is not a list of objects")
    return rows


def _fetched(source: Source, what: str) -> Iterator[Mapping[str, Any]]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        hint = f"{pip_install('datasets')}, or read a copy in JSON lines with --data FILE"
        raise UsageError(f"{what} needs the package `datasets`, which is not installed", hint) from error
    try:
        # Streaming, because a download always includes every split: WMT19's training text is gigabytes.
        yield from datasets.load_dataset(
            source.path, source.name, data_files=source.data_files, split=source.split, streaming=True
        )
    except Exception as error:  # the network, the hub and the file readers raise exceptions of many types
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UsageError(f"{what} cannot be read: {reason}", OFFLINE_HINT) from error
