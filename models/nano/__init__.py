"""nano: the embedded DeepSeek-V4-architecture model and the recipe that trained it. Imports nothing by itself."""
