"""Side-by-side benchmarks: each prints its figures beside the bar it must reach and exits 1 on a miss."""
