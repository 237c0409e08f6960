"""Model families: configs, parameter shapes and arithmetic. A leaf: imports nothing of dllm_jax."""
