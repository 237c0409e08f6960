"""From a model and a configuration to a runner with every program compiled."""
