"""Seeded generators of nano's conversations, their checkers and their rendering. Imports nothing by itself."""
