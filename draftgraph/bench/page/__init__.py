"""Measurements as one self-contained page."""

from draftgraph.bench.page.page import Part, Section, page

__all__ = ["Part", "Section", "page"]
