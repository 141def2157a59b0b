"""Reads parquet files, Arrow files, compressed files and Hugging Face datasets, with pyarrow and the
`datasets` library (extra hf)."""

import contextlib
import functools
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.parallel.errors import one_line
from meshwright.train.data.sources import HF_PREFIX
from meshwright.train.errors import DataError

CHUNK_BYTES = 2**20
SET_FIELD = "set the field of the text with data.text_field (--text_field of tools.prepare_data)"
_ROWS = 256  # per read: few enough that long documents fit in memory, many enough to amortize the call


def count_groups(path: Path, kind: str) -> int:
    """Return the number of row groups (parquet) or record batches (arrow) of a file. Raises DataError."""
    pyarrow = import_pyarrow(path)
    with read_errors(path):
        if kind == "parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                return int(file.num_row_groups)
        with pyarrow.memory_map(str(path)) as source:
            reader = _open_arrow(pyarrow, source)
            return (
                reader.num_record_batches if hasattr(reader, "num_record_batches") else sum(1 for _ in reader)
            )


def read_rows(
    path: Path, kind: str, first: int, last: int, field: str
) -> Iterator[tuple[int, list[bytes | None]]]:
    """Yield the texts of groups first to last - 1 in batches: the number of the first row in the file, and a
    list of texts with None for null. Raises DataError."""
    pyarrow = import_pyarrow(path)
    with read_errors(path):
        read = _read_parquet if kind == "parquet" else _read_arrow
        for row, batch in read(pyarrow, path, first, last, field):
            yield row, _to_bytes(pyarrow, batch.column(0), field, path)


def unpack(raw: Any, kind: str, path: Path) -> Any:
    """Return a stream of a file's content, which is decompressed if its kind ends in .gz or .zst."""
    if kind.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), CHUNK_BYTES)  # type: ignore[arg-type]
    if kind.endswith(".zst"):
        return io.BufferedReader(import_pyarrow(path).CompressedInputStream(raw, "zstd"), CHUNK_BYTES)
    return raw


def import_pyarrow(source: Path | str) -> Any:
    """Import pyarrow and pyarrow.parquet; late, because only some sources need it. Raises DataError."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        raise DataError(
            f"{source} is read with pyarrow, which is not installed: pip install -e '.[hf]'"
        ) from None
    return pyarrow


@contextlib.contextmanager
def read_errors(path: Path | str) -> Iterator[None]:
    """A context that converts the exceptions of a library into a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        damage = "" if getattr(error, "errno", None) else "; it may be damaged or cut short"
        raise DataError(
            f"data.source: {path} cannot be read{damage} ({reason}): restore it or leave it out"
        ) from None


def _read_parquet(pyarrow: Any, path: Path, first: int, last: int, field: str) -> Iterator[tuple[int, Any]]:
    with pyarrow.parquet.ParquetFile(path) as file:
        check_field(field, file.schema_arrow.names, path)
        row = sum(file.metadata.row_group(i).num_rows for i in range(first))
        for batch in file.iter_batches(
            _ROWS, row_groups=range(first, last), columns=[field], use_threads=False
        ):
            yield row, batch
            row += batch.num_rows


def _read_arrow(pyarrow: Any, path: Path, first: int, last: int, field: str) -> Iterator[tuple[int, Any]]:
    """Read memory-mapped, so that the batches before `first` are not read."""
    with pyarrow.memory_map(str(path)) as source:
        reader = _open_arrow(pyarrow, source)
        check_field(field, reader.schema.names, path)
        indexed = hasattr(reader, "num_record_batches")
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if indexed else reader
        row = 0
        for number, batch in enumerate(batches):
            if number == last:
                return
            if number >= first:
                column = batch.select([field])
                yield from ((row + i, column.slice(i, _ROWS)) for i in range(0, batch.num_rows, _ROWS))
            row += batch.num_rows


def _open_arrow(pyarrow: Any, source: Any) -> Any:
    """A reader for either of Arrow's formats: that of files, which has an index, or of streams."""
    try:
        return pyarrow.ipc.open_file(source)
    except pyarrow.ArrowInvalid:
        source.seek(0)
        return pyarrow.ipc.open_stream(source)


def check_field(field: str, names: list[str], path: Path | str) -> None:
    """Raise DataError if no column of a table is named `field`."""
    if field not in names:
        known = one_line(", ".join(names)) or "none"
        raise DataError(f"data.source: {path} has no field {field} (fields: {known}): {SET_FIELD}")


def _to_bytes(pyarrow: Any, column: Any, field: str, path: Path | str) -> list[bytes | None]:
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = str(column.type)
    if kind.removeprefix("large_").removesuffix("_view") not in ("string", "binary", "null"):
        raise DataError(f"data.source: {path}: the field {field} is {kind}, not text: {SET_FIELD}")
    wanted = pyarrow.binary_view() if kind.endswith("_view") else pyarrow.large_binary()
    texts: list[bytes | None] = column.cast(wanted).to_pylist()
    return texts


# Hugging Face datasets


@functools.lru_cache(maxsize=1)
def open_dataset(source: str) -> Any:
    """Load the map-style dataset hf:NAME[:CONFIG[:SPLIT]] or hf:FOLDER[:CONFIG[:SPLIT]]. Raises DataError."""
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError:
        raise DataError(f"{source} needs the datasets library: pip install -e '.[hf]'") from None
    name, config, split = [*source.removeprefix(HF_PREFIX).split(":"), "", ""][:3]
    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(name)
            return saved[split or "train"] if isinstance(saved, dict) else saved
        return datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # the library raises many classes, also those of its dependencies
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"{source} cannot be loaded by the datasets library ({type(error).__name__}: {reason}): "
            "use hf:NAME:CONFIG:SPLIT as on the hub, or hf:FOLDER"
        ) from None


def read_dataset(source: str, first: int, last: int, field: str) -> Iterator[tuple[int, list[bytes | None]]]:
    """Yield the texts of rows first to last - 1 in the form of read_rows. Raises DataError."""
    dataset, pyarrow = open_dataset(source), import_pyarrow(source)
    check_field(field, dataset.column_names, source)
    with read_errors(source):
        column = dataset.select_columns([field]).with_format("arrow")
        for row in range(first, last, _ROWS):
            chunks = column[row : min(row + _ROWS, last)].column(0)
            yield row, _to_bytes(pyarrow, chunks.combine_chunks(), field, source)
