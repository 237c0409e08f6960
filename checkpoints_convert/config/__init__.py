"""The `config.json` of each family: read into plain network fields, and written back."""
