"""DeepSeek-V4: window, compressed sparse and heavily compressed attention, hyper-connections, two kinds of MoE."""
