"""The model that is drafted for: files, identity, tensors, layer numbers."""
