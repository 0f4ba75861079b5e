"""Conversion of ragged samples into static arrays: the plan of rows and micro-batches, and the packing."""
