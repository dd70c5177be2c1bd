"""Pallas kernels. Nothing is imported here: a kernel module loads when a call is dispatched to it."""
