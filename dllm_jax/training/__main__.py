"""`python -m dllm_jax.training`: the same as `dllm-jax train`."""

if __name__ == "__main__":  # data workers import this module again, without jax
    import sys

    from dllm_jax.training.command import main

    sys.exit(main())
