"""Draws the denoising window in the terminal, and as plain lines where there is no terminal.

Committed text is plain, settled cells are green, provisional ones (a hole is still before them)
yellow, holes grey dots. Nothing here knows about models: a `Frame` is text already.
"""

import dataclasses
import shutil
import sys
from typing import TextIO

GREEN, YELLOW, GREY, RESET = "\x1b[32m", "\x1b[33m", "\x1b[90m", "\x1b[0m"
HOLE, END_MARK = "·", "▪"


@dataclasses.dataclass(frozen=True)
class Frame:
    """The window after one forward.

    Attributes:
        committed: Text before the window (without the prompt).
        cells: One text a cell of the window's open blocks, None for a hole; prompt cells left out.
        num_settled: Leading cells that can never change again.
    """

    nfe: int
    committed: str
    cells: tuple[str | None, ...]
    num_settled: int


class Watch:
    """Shows one frame after another: in place on a terminal, as one line a frame elsewhere."""

    def __init__(self, out: TextIO | None = None, tty: bool | None = None):
        self._out = sys.stdout if out is None else out
        self._tty = self._out.isatty() if tty is None else tty
        self._height = 0

    def show(self, frame: Frame) -> None:
        """Draw a frame over the last one."""
        if not self._tty:
            text = "".join(HOLE if cell is None else cell for cell in frame.cells)
            print(f"forward {frame.nfe:>3} |{text}|", file=self._out, flush=True)
            return
        columns = shutil.get_terminal_size().columns
        body = f"forward {frame.nfe}\n{frame.committed}{_paint(frame)}{RESET}"
        bare = f"forward {frame.nfe}\n{frame.committed}" + "".join(c or HOLE for c in frame.cells)
        self._out.write(self._rewind() + body + "\n")
        self._out.flush()
        self._height = sum(max(1, -(-len(line) // columns)) for line in bare.split("\n"))

    def clear(self) -> None:
        """Take the drawing away, so that what follows stands in its place."""
        if self._tty:
            self._out.write(self._rewind())
            self._out.flush()
        self._height = 0

    def _rewind(self) -> str:
        return f"\x1b[{self._height}A\r\x1b[J" if self._height else ""


def _paint(frame: Frame) -> str:
    """Cells in their colours, a colour change only where the colour changes."""
    parts, current = [], ""
    for i, cell in enumerate(frame.cells):
        color = GREY if cell is None else GREEN if i < frame.num_settled else YELLOW
        parts.append((color if color != current else "") + (HOLE if cell is None else cell))
        current = color
    return "".join(parts)
