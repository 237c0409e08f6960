"""Draws the denoising window in the terminal, and as plain lines where there is no terminal.

Committed text is plain, settled cells are green, provisional ones (a hole is still before them)
yellow, holes grey dots. Nothing here knows about models: a `Frame` is text already.
"""

import dataclasses
import shutil
import sys
import unicodedata
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
        behind: Text that was given behind the last cell.
    """

    nfe: int
    committed: str
    cells: tuple[str | None, ...]
    num_settled: int
    behind: str = ""


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
            behind = frame.behind.replace("\n", "⏎")
            print(f"forward {frame.nfe:>3} |{text}|{behind}", file=self._out, flush=True)
            return
        columns, lines = shutil.get_terminal_size()
        rows = _rows(frame, columns)
        # What has scrolled off cannot be drawn over, and the last line holds the cursor.
        rows = rows[-max(1, lines - 2) :]
        body = f"forward {frame.nfe}\n" + "\n".join(rows) + RESET + "\n"
        self._out.write(self._rewind() + body)
        self._out.flush()
        self._height = 1 + len(rows)

    def clear(self) -> None:
        """Take the drawing away, so that what follows stands in its place."""
        if self._tty:
            self._out.write(self._rewind())
            self._out.flush()
        self._height = 0

    def _rewind(self) -> str:
        return f"\x1b[{self._height}A\r\x1b[J" if self._height else ""


def _rows(frame: Frame, columns: int) -> list[str]:
    """Text and cells as terminal rows, each in its own colours, broken where the terminal would."""
    pieces = [(frame.committed, "")]
    for i, cell in enumerate(frame.cells):
        color = GREY if cell is None else GREEN if i < frame.num_settled else YELLOW
        pieces.append((HOLE if cell is None else cell, color))
    pieces.append((frame.behind, RESET))
    rows, used, current = [""], 0, ""
    for text, color in pieces:
        for char in text:
            wide = 2 if unicodedata.east_asian_width(char) in "WF" else 1
            if char == "\n" or used + wide > columns:
                rows.append("")
                used, current = 0, ""
            if char == "\n":
                continue
            rows[-1] += (color if color != current else "") + char
            used, current = used + wide, color
    return rows
