"""Proving an engine equal to PyTorch: polygraphy runners, paged batches, tolerances, reports."""
