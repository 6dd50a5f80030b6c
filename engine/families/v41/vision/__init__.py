"""V4.1's vision: image bytes in, embeddings of image tokens out. Knows nothing of caches, requests and services."""
