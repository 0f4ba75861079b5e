"""Reads data sets, encodes them with the chat template and tokenizer, and chooses the prompts of each step."""
