"""The fast path of the training loop: hand-written kernels and backward pass."""
