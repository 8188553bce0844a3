"""The EAGLE-3 drafter and its training-time test, in readable PyTorch."""
