"""DeepSeek-V4.1: a causal encoder-decoder schedule over shared compressed entries, Engram, and two kinds of MoE."""
