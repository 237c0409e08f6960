"""Reading whole files: only regular ones, up to a given size."""

import stat
from pathlib import Path

MOST_BYTES = 100_000_000  # a tokenizer.json with 256k tokens has 33 MB
MOST_TEMPLATE_BYTES = 1_000_000


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is a folder, a pipe or a device, or larger than `most` bytes.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        what = "folder" if stat.S_ISDIR(found.st_mode) else "pipe or a device"
        raise ValueError(f"{path.name} is a {what}; give a regular file")
    if found.st_size > most:
        raise ValueError(
            f"{path.name} has {found.st_size} bytes; at most {most} are read, give a smaller file"
        )
    with path.open("rb") as file:
        return file.read(most)  # a file of /proc states no size


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The content of a UTF-8 file.

    Raises:
        OSError, ValueError: As in `read_bytes`, or if the file is not UTF-8.
    """
    return read_bytes(path, most).decode("utf-8")
