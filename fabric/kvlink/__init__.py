"""The KV link: bytes of one process written one-sided into slabs of another. Knows buffers, never models."""
