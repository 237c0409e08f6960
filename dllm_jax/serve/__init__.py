"""The OpenAI-compatible HTTP server: a front process without JAX and an engine process behind it.

`app` answers HTTP, `client` is the front's end of the pipe, `child` is the engine process. Only
`child` imports JAX.
"""
