"""Tier 3: records in append-only files of one directory. Format, files, tier; no network and no DRAM of its own."""
