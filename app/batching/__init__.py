"""Ragged samples -> static arrays: which sample in which micro-batch row, and the packing itself."""
