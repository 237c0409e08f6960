"""What runs on the device: the compiled programs, their sizes, memory and times."""
