"""The engine's operators on Hopper: CUDA C++ where `domain` says so, Triton elsewhere; `ops` gathers them."""
