"""Model families: configs, parameter shapes and arithmetic."""
