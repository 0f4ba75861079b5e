"""The network: its shape, its weights, its forward pass and what training needs of it."""
