"""Kernels in CUDA C++ for Hopper, compiled when first used. Knows no model."""
