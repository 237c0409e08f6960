"""Model families: configs, parameter shapes and arithmetic.

A leaf: of ours it imports operations of pallas_kernels only.
"""
