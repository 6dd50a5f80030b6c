"""DeepSeek-V2, V3 (and R1) and V3.2: latent attention, dense or sparse, over grouped experts."""
