"""Writes the policy of a checkpoint as a Hugging Face directory or a PEFT adapter."""
