"""The engine's operators in Triton; `ops` gathers them."""
