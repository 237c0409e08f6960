"""Finished parts of a long run, a line of JSON each, for the same command to go on from."""

import json
import sys
from pathlib import Path
from typing import Any

from dllm_jax.cli.errors import UsageError
from dllm_jax.cli.interrupt import NOTHING_FINISHED
from dllm_jax.cli.text import count

_SUFFIX = ".partial"


class Stored:
    """The parts of one run: in memory, and in `FILE.partial` where the run has an output.

    Args:
        output: The file of the whole result; None: nothing is written.
        about: What the run is of; parts of another run are refused.

    Raises:
        UsageError: The file is of another run.
    """

    def __init__(self, output: str | None, about: dict[str, Any]):
        self._path = None if output is None else Path(output + _SUFFIX)
        self._parts: dict[str, Any] = {}
        self._num_added = 0
        if self._path is None:
            return
        about = json.loads(json.dumps(about))
        lines = self._read() if self._path.exists() else []
        if lines and lines[0] != about:
            differ = [key for key in about if lines[0].get(key) != about[key]]
            raise UsageError(
                f"{str(self._path)!r} holds parts of another run ({', '.join(differ)}); remove it "
                "or choose another --output"
            )
        self._parts = dict(lines[1:])
        if self._parts:
            print(
                f"going on from {count(len(self._parts), 'part')} in {str(self._path)!r}",
                file=sys.stderr,
            )
        text = "".join(json.dumps(line) + "\n" for line in (about, *self._parts.items()))
        self._path.write_bytes(text.encode())

    def _read(self) -> list[Any]:
        """What the run is of, and its parts, up to a line that was cut off."""
        assert self._path is not None
        lines: list[Any] = []
        try:
            for line in self._path.read_bytes().split(b"\n"):
                one = json.loads(line)
                if not (_is_part(one) if lines else isinstance(one, dict)):
                    break
                lines.append(one)
        except (ValueError, RecursionError):  # the run ended while it wrote
            pass
        except OSError as error:
            raise UsageError(f"{str(self._path)!r} cannot be read: {error.strerror}") from None
        return lines

    def get(self, *key: Any) -> Any:
        """A part, None where it is not there yet."""
        return self._parts.get(json.dumps(key))

    def add(self, *key: Any, part: Any) -> None:
        """Store a part at once."""
        self._num_added += 1
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([json.dumps(key), part]) + "\n")

    def tell(self) -> str:
        """The error line of a run that is interrupted."""
        number = len(self._parts) + self._num_added
        if not number:
            return NOTHING_FINISHED
        if self._path is None:
            return f"interrupted; {count(number, 'part')} finished, kept only with --output FILE"
        kept = f"{count(number, 'part')} in {str(self._path)!r}"
        return f"interrupted; the same command goes on from {kept}"

    def finish(self) -> None:
        """Remove the file: the whole result is written."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _is_part(line: Any) -> bool:
    return isinstance(line, list) and len(line) == 2 and isinstance(line[0], str)
