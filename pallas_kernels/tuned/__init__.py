"""Tables of the tiles that a card has shown fastest, ``sm_90.json`` and so on: {op: {case: tile}}.

Written by benchmarks/gpu.py, read through ``pallas_kernels.platform.tuned``.
"""
