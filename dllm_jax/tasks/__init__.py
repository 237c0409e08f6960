"""Word problems with known answers, and the evaluation of a model on them."""
