"""The network: architecture, forward pass, decoding, logprobs, adapters, and reading of checkpoints."""
