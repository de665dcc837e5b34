"""Rows of any file become token sequences with labels, and those become the rectangular batches of a pack."""
