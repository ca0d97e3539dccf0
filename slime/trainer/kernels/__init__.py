"""GPU kernels in Triton, for what neither torch nor `torch.compile` does in one pass over memory.

Modules here import triton, which comes with torch's CUDA builds: import them where a tensor is on a
GPU only. Each has a torch function beside it that says what it computes, and that tests compare it
with.
"""
