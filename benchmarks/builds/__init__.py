"""Kernel builds of build_tools/kernels.py beside each other: checked, then timed in one process."""
