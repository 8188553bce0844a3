"""Training sequences and the draft vocabulary."""
