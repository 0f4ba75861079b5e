"""samples -> per-token logprobs for one role, through batching and policy."""
