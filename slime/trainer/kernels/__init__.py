"""Triton kernels for computations that neither torch nor `torch.compile` does in one pass over
memory.

These modules import triton, which comes with torch's CUDA builds: import them only where a tensor
is on a GPU. Tests compare each kernel with a torch function that computes the same.
"""
