"""EMA-Adam: the operator (without optax), the optax transform, and its step in one operator."""
