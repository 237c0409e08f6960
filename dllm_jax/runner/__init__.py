"""The device side of the engine: compiled programs, their sizes, memory and times."""
