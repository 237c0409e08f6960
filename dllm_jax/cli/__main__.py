"""`python -m dllm_jax.cli`: the same as `dllm-jax`."""

import sys

from dllm_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
