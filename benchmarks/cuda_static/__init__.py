"""What can be said of the CUDA kernels without a GPU. See __main__.py."""
