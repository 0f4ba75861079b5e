"""credit -> gradients -> new weights."""
