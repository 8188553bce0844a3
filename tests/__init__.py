"""Tests mirror workflow/; helpers lie on top."""
