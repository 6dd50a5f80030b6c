"""Kernels for bytes in host memory, of use to whatever moves them. Know no operator and no tensor."""
