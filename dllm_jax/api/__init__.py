"""What users call: `LLM`, `generate`, and how a strategy is chosen for a model."""
