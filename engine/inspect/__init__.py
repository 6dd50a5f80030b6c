"""What a checkpoint is and what it costs: parameters, bytes, caches, memory. Runs no model and reads no weights."""
