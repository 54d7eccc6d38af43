"""Checks and times the CUDA kernels on the GPU of this machine: `python tools/gpu_check`."""
