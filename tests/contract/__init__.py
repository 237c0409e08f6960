"""The contract's gate: toy models, toy strategies, a paged harness and dense cache-free truths."""
