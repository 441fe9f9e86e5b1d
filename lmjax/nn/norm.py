"""Normalisation of feature-major activations."""

from pallas_kernels.heads import rms_norm

__all__ = ["rms_norm"]
