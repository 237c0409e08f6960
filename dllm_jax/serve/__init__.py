"""The OpenAI-compatible HTTP server: a front process without JAX, and the engine's process.

`app` answers HTTP, `client` is the front's end of the pipe, `child` is the engine process. Only
`child` imports JAX.
"""
