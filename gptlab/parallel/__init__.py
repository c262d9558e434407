"""How a step is spread over processes. The model knows nothing of it."""
