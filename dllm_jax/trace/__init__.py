"""Visualisation of how a text was denoised: a page that replays it, or pictures."""
