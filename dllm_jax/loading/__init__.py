"""From a name or a folder to a model: hub, weights, tokenizer, chat template."""
