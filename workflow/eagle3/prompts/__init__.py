"""Rows of any shape become prompts with token ids."""
