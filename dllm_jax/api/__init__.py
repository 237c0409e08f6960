"""The Python interface: `LLM`, `generate`, and the choice of a strategy for a model."""
