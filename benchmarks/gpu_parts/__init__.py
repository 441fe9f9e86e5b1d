"""The sections of benchmarks/gpu.py. They import jax, numpy, flax and this repository, and nothing else."""
