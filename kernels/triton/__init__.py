"""GPU kernels in Triton. Imports nothing by itself: the package triton is wanted only where a GPU is."""
