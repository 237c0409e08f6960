"""Slow twins of the project's algorithms, written from the notes, never from the code."""
