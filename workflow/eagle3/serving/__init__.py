"""A SGLang server and how to talk to it."""
