"""The host loop: requests, slots, pages and rounds as plain Python, without JAX."""
