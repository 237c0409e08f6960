"""Scores of whole texts by a network, without an engine and its cache."""
