"""Runners of several processes, and kernels of several devices."""
