"""How a text was denoised, to look at: a page that replays it, or pictures."""
