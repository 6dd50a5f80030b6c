"""Canonical cache records: the bytes of one row as published engines exchange them. Knows no paging and no engine."""

from engine.cache.records.record import MixedRecord, PlainRecord, Record, ScaleKind

__all__ = ["MixedRecord", "PlainRecord", "Record", "ScaleKind"]
