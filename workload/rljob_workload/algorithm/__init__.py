"""The learning algorithm. `advantages` is plain Python (the collector uses it); `grpo` holds the loss in torch."""
