"""What a folder holds, safe from a power cut."""

import os
from pathlib import Path


def flush_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
