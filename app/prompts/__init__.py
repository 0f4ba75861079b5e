"""Text to token ids: data sets, chat template, tokenizer, and the prompts of each step."""
