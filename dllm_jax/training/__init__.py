"""Training of the built-in models: data, tokenizer, objective, loop, export."""
