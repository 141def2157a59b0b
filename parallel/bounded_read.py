"""Reading a file that anyone may have written."""

from pathlib import Path


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """A file's content. OSError if it cannot be read; ValueError for what is no regular file, which may never
    end, and for one of more than `limit_bytes`."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")
    with open(path, "rb") as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise ValueError(f"larger than the {limit_bytes:,} bytes that are read")
    return content
