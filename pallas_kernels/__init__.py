"""Kernels behind functional interfaces: what is computed here, fast ways beside it."""
