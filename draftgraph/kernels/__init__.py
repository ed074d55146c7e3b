"""One file per operation: the PyTorch reference, the kernel, and the function that chooses between them."""
