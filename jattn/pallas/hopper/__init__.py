"""Mosaic GPU kernels for compute capability 9.0 (H100, H200), one family a file."""
