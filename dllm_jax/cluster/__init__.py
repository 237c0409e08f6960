"""What several processes, or kernels of several devices, add to a runner."""
