"""Joins the pictures of `dllm-jax trace --out FOLDER/` into an animation.

docs/images/denoise.gif was made by:

    dllm-jax trace --seed 7 --half hard --out steps/
    python docs/images/denoise.py steps/ docs/images/denoise.gif
"""

import sys
from pathlib import Path

from PIL import Image

COLOURS = 48
STEP_MS, LAST_STEP_MS = 900, 3000

folder, out = sys.argv[1:]
pictures = [Image.open(path).convert("RGB") for path in sorted(Path(folder).glob("*.png"))]
height = max(picture.height for picture in pictures)
frames = []
for picture in pictures:
    frame = Image.new("RGB", (picture.width, height), "white")
    frame.paste(picture, (0, 0))
    frames.append(frame.resize((frame.width // 2, height // 2), Image.Resampling.LANCZOS))
palette = frames[len(frames) // 2].quantize(COLOURS)
frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
durations = [STEP_MS] * (len(frames) - 1) + [LAST_STEP_MS]
frames[0].save(
    out, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True
)
