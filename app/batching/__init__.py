"""Converts ragged samples into static arrays: plans rows and micro-batches, then packs the samples."""
