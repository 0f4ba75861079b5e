"""Computes losses and gradients from advantages, and updates the weights."""
