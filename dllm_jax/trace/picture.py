"""A frame of a trajectory as a PNG that looks like the page in light colours.

The font is matplotlib's; characters that it lacks are written as code points.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from dllm_jax.loading.pieces import piece
from dllm_jax.trace.replay import HOLE, Frame, Replay, replay
from dllm_jax.trace.trajectory import Trajectory

SCALE = 2  # pixels of a unit; all sizes below are in units
COLUMNS, CELL_WIDTH, CELL_HEIGHT, GAP = 16, 64, 34, 3
MARGIN, HEAD, PAD, LETTERS = 16, 22, 8, 8
PAGE, INK, SOFT, LINE, PANEL, WINDOW = (
    "#ffffff",
    "#1c2024",
    "#5b6570",
    "#c4cbd3",
    "#f4f6f8",
    "#1f5fbf",
)
NEW, EDIT, UNASKED = "#0b6b2e", "#a3166b", "#e6e9ec"
# Lower edges of the colours of probabilities, in thousandths.
COLOURS = ((970, "#b5dcdf"), (900, "#cfe6d2"), (700, "#e9ecc4"), (500, "#f7dca6"), (0, "#f6c08a"))
STATES = ("not open", "active", "to cache")


def render_pictures(trajectory: Trajectory, tokenizer: Any = None) -> Iterator[Image.Image]:
    """One picture before the first step, then one after each step.

    Args:
        tokenizer: A transformers tokenizer; None shows ids.

    Raises:
        ValueError: A trajectory without steps.
    """
    played = replay(trajectory)
    held: dict[int, tuple[int, int]] = {}
    for number, frame in enumerate(played.frames):
        for position, token, share in frame.put:
            held[position] = (token, share)
            if token == HOLE:
                del held[position]
        yield _Picture(trajectory, tokenizer, played, frame, number, held).draw()


class _Picture:
    """One frame on one canvas."""

    def __init__(
        self,
        trajectory: Trajectory,
        tokenizer: Any,
        played: Replay,
        frame: Frame,
        number: int,
        held: dict[int, tuple[int, int]],
    ):
        self._trajectory, self._tokenizer, self._played = trajectory, tokenizer, played
        self._frame, self._number, self._held = frame, number, held
        self._window_end = frame.start + trajectory.steps[0].before.tokens.size
        self._guesses = {position: rest for position, *rest in frame.guesses}
        self._accepted, self._edited = set(frame.accepted), dict(frame.edited)

    def draw(self) -> Image.Image:
        size = self._played.block_size or self._played.end - self._played.first
        starts = range(self._played.first, self._played.end, size)
        heights = [self._height(start, size) for start in starts]
        width = 2 * (MARGIN + PAD) + COLUMNS * (CELL_WIDTH + GAP) - GAP
        height = 2 * MARGIN + 2 * HEAD + sum(heights)
        image = Image.new("RGB", (width * SCALE, height * SCALE), PAGE)
        self._draw = ImageDraw.Draw(image)
        self._text(MARGIN, MARGIN, self._heading(), 14, INK)
        y = MARGIN + 2 * HEAD
        for start, tall in zip(starts, heights, strict=True):
            self._block(start, size, y, width, tall)
            y += tall
        self._frame_of_window(starts, heights, size, width)
        return image

    def _heading(self) -> str:
        frame, last = self._frame, len(self._played.frames) - 1
        rate = frame.num_settled / max(frame.nfe, 1)
        end = f", finished ({self._trajectory.finish_reason})" if self._number == last else ""
        return (
            f"{self._trajectory.strategy}  step {self._number} of {last}  {frame.nfe} forwards  "
            f"{frame.num_settled} tokens settled  {rate:.2f} tokens per forward{end}"
        )

    def _status(self, start: int) -> str:
        if not self._played.block_size:
            return STATES[self._frame.status[0]]
        if start < self._frame.start:
            return "cached"
        inside = start < self._window_end
        place = (start - self._frame.start) // self._played.block_size
        return STATES[self._frame.status[place]] if inside else STATES[0]

    def _height(self, start: int, size: int) -> int:
        rows = -(-min(size, self._played.end - start) // COLUMNS)
        cells = 0 if self._status(start) == STATES[0] else rows * (CELL_HEIGHT + GAP)
        return HEAD + cells + PAD

    def _block(self, start: int, size: int, y: int, width: int, tall: int) -> None:
        end, status = min(start + size, self._played.end), self._status(start)
        if self._is_window(start):
            box = (MARGIN, y, width - MARGIN, y + tall)
            self._draw.rectangle([SCALE * side for side in box], fill=PANEL)
        name = f"block {(start - self._played.first) // size + 1}  "
        name = name if self._played.block_size else ""
        heading = f"{name}positions {start} to {end - 1}  {status}"
        self._text(MARGIN + PAD, y + 4, heading, 11, SOFT)
        if status == STATES[0]:
            return
        for position in range(start, end):
            row, column = divmod(position - start, COLUMNS)
            x = MARGIN + PAD + column * (CELL_WIDTH + GAP)
            self._cell(position, x, y + HEAD + row * (CELL_HEIGHT + GAP))

    def _is_window(self, start: int) -> bool:
        on_grid = self._played.block_size > 0
        return on_grid and self._frame.start <= start < self._window_end

    def _frame_of_window(self, starts: range, heights: list[int], size: int, width: int) -> None:
        top = MARGIN + 2 * HEAD
        inside = [i for i, start in enumerate(starts) if self._is_window(start)]
        if inside:
            y0, y1 = top + sum(heights[: inside[0]]), top + sum(heights[: inside[-1] + 1])
            self._box(MARGIN, y0, width - 2 * MARGIN, y1 - y0, None, WINDOW, 3)

    def _cell(self, position: int, x: int, y: int) -> None:
        held, guess = self._held.get(position), self._guesses.get(position)
        is_prompt = position < len(self._trajectory.prompt)
        fill = None if held is None or is_prompt else colour(held[1])
        edge = LINE if is_prompt else None
        edge = NEW if position in self._accepted else EDIT if position in self._edited else edge
        if not self._played.block_size and self._frame.start <= position < self._window_end:
            edge = edge or WINDOW
        self._box(x, y, CELL_WIDTH, CELL_HEIGHT, fill, edge, 2)
        if held is None:
            self._dashes(x, y)
        token, share = held or guess or (HOLE, -1)
        shown = "·" if token == HOLE else _printable(piece(self._tokenizer, token).text)
        lines = [shown[i : i + LETTERS] for i in range(0, len(shown), LETTERS)][:2]
        for i, line in enumerate(lines):
            middle = y + CELL_HEIGHT / 2 + (i - (len(lines) - 1) / 2) * 12
            ink = SOFT if held is None else INK
            self._text(x + CELL_WIDTH / 2, middle, line, 11, ink, mono=True, anchor="mm")
        mark = "+" if position in self._accepted else "~" if position in self._edited else ""
        self._text(x + 3, y + 1, mark, 11, NEW if mark == "+" else EDIT, mono=True)
        if share > 0 and not is_prompt:
            end = x + 3 + (CELL_WIDTH - 6) * share / 1000
            bar = (x + 3, y + CELL_HEIGHT - 5, end, y + CELL_HEIGHT - 3)
            self._draw.rectangle([SCALE * side for side in bar], fill=SOFT if held else LINE)

    def _box(
        self,
        x: float,
        y: float,
        wide: float,
        tall: float,
        fill: str | None,
        edge: str | None,
        n: int,
    ) -> None:
        box = [SCALE * side for side in (x, y, x + wide, y + tall)]
        self._draw.rounded_rectangle(box, 4 * SCALE, fill, edge, n * SCALE if edge else 0)

    def _dashes(self, x: int, y: int) -> None:
        """The edge of a hole."""
        for i in range(0, CELL_WIDTH, 8):
            for row in (y, y + CELL_HEIGHT - 1):
                self._line(x + i, row, x + min(i + 4, CELL_WIDTH), row)
        for i in range(0, CELL_HEIGHT, 8):
            for column in (x, x + CELL_WIDTH - 1):
                self._line(column, y + i, column, y + min(i + 4, CELL_HEIGHT))

    def _line(self, x0: float, y0: float, x1: float, y1: float) -> None:
        self._draw.line([SCALE * side for side in (x0, y0, x1, y1)], LINE, SCALE)

    def _text(
        self, x: float, y: float, text: str, size: int, ink: str, mono: bool = False, anchor="la"
    ) -> None:
        font = _font(mono, size * SCALE)
        self._draw.text((x * SCALE, y * SCALE), text, fill=ink, font=font, anchor=anchor)


def colour(share: int) -> str:
    """The colour of a probability in thousandths; a negative number means no probability."""
    return next((name for edge, name in COLOURS if share >= edge), UNASKED)


def _printable(text: str) -> str:
    """The text, with code points in place of characters that the font lacks."""
    known = _letters()
    return "".join(char if ord(char) in known else f"U+{ord(char):04X}" for char in text)


def _font_file(mono: bool) -> Path:
    import matplotlib  # heavy, and needed here only

    name = "DejaVuSansMono.ttf" if mono else "DejaVuSans.ttf"
    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name


@functools.cache
def _font(mono: bool, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(_font_file(mono)), size)


@functools.cache
def _letters() -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(str(_font_file(mono=True))).get_charmap())
