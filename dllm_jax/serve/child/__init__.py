"""The engine process: `process` makes an engine, and `loop` runs it until the front has gone.

Data flow: socket -> `loop` -> the engine that `engine` hands over (`served`) -> deltas -> `outbox`,
which merges what it could not send yet -> socket. Only here does the server import JAX.
"""
