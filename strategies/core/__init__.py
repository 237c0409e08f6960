"""The machinery that algorithms are written with."""
