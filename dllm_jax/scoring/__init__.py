"""What a network says of whole texts, without an engine and its cache."""
