"""Draws the denoising window in the terminal, or as plain lines without a terminal.

Data flow: an output of the engine -> `frame`, as text -> `Watch.show`. Committed text is plain,
settled cells are green, provisional ones (after a hole) yellow, holes grey dots.
"""

import dataclasses
import os
import shutil
import sys
import unicodedata
from collections import abc
from typing import Any, TextIO

from dllm_jax.cli.text import shown
from dllm_jax.engine.requests import RequestOutput
from dllm_jax.engine.sequence import Sequence

GREEN, YELLOW, GREY, RESET = "\x1b[32m", "\x1b[33m", "\x1b[90m", "\x1b[0m"
HOLE, END_MARK = "·", "▪"


@dataclasses.dataclass(frozen=True)
class Frame:
    """The window after one forward.

    Attributes:
        committed: Text before the window, without the prompt.
        cells: The text of each cell in the open blocks, None for a hole; without prompt cells.
        num_settled: Leading cells that can never change again.
        behind: The given text behind the last cell.
    """

    nfe: int
    committed: str
    cells: tuple[str | None, ...]
    num_settled: int
    behind: str = ""


class Watch:
    """Shows frames: in place on a terminal, elsewhere one line a frame.

    A terminal that cannot move its cursor (`TERM=dumb`) gets lines too; one whose user wants no
    colours (`NO_COLOR`) gets none.
    """

    def __init__(self, out: TextIO | None = None, tty: bool | None = None):
        self._out = sys.stdout if out is None else out
        self._tty = self._out.isatty() if tty is None else tty
        self._in_place = self._tty and os.environ.get("TERM") != "dumb"
        self._colored = not os.environ.get("NO_COLOR")
        self._height = 0

    def show(self, frame: Frame) -> None:
        """Draw a frame over the last one."""
        frame = dataclasses.replace(
            frame,
            committed=shown(frame.committed, self._tty),
            cells=tuple(None if cell is None else shown(cell, self._tty) for cell in frame.cells),
            behind=shown(frame.behind, self._tty),
        )
        if not self._in_place:
            text = "".join(HOLE if cell is None else cell for cell in frame.cells)
            behind = frame.behind.replace("\n", "⏎")
            print(f"forward {frame.nfe:>3} |{text}|{behind}", file=self._out, flush=True)
            return
        columns, lines = shutil.get_terminal_size()
        rows = _rows(frame, columns, self._colored)
        # Lines that scrolled off cannot be redrawn, and the last line holds the cursor.
        rows = rows[-max(1, lines - 2) :]
        body = f"forward {frame.nfe}\n" + "\n".join(rows) + RESET * self._colored + "\n"
        self._out.write(self._rewind() + body)
        self._out.flush()
        self._height = 1 + len(rows)

    def clear(self) -> None:
        """Remove the drawing, so that later output takes its place."""
        if self._in_place:
            self._out.write(self._rewind())
            self._out.flush()
        self._height = 0

    def _rewind(self) -> str:
        return f"\x1b[{self._height}A\r\x1b[J" if self._height else ""


def _rows(frame: Frame, columns: int, colored: bool) -> list[str]:
    """Text and cells as terminal rows, broken at the width of the terminal."""
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
            rows[-1] += (color if colored and color != current else "") + char
            used, current = used + wide, color
    return rows


def frame(model: Any, output: RequestOutput, sequence: Sequence) -> Frame:
    """The current window of a text; end marks are small squares.

    Args:
        output: Of a request with `denoise`.
        sequence: The engine's record of the text; the window begins at its `start`.
    """
    one, placement = output.outputs[0], sequence.placement
    behind = placement.given[placement.limit - placement.prompt_len :]
    committed = min(max(0, sequence.start - len(sequence.prompt)), len(one.token_ids))
    settled = one.token_ids[committed:]
    return Frame(
        nfe=sequence.nfe,
        committed=model.tokenizer.decode(one.token_ids[:committed], skip_special_tokens=True),
        cells=cell_texts(model, (*settled, *one.window)),
        num_settled=len(settled),
        behind=model.tokenizer.decode(list(behind), skip_special_tokens=True) if behind else "",
    )


def cell_texts(model: Any, cells: abc.Sequence[int | None]) -> tuple[str | None, ...]:
    """Each cell as text, None for a hole; line ends are visible. Ids without a tokenizer."""
    return tuple(None if cell is None else _cell_text(model, cell) for cell in cells)


def _cell_text(model: Any, token: int) -> str:
    if token in model.defaults.stop_token_ids:
        return END_MARK
    if model.tokenizer is None:
        return f"[{token}]"
    return model.tokenizer.decode([token]).replace("\n", "⏎")
