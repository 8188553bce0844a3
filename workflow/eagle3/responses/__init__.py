"""Answers to prompts, resumable."""
