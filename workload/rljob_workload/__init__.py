"""The trainer of RLJob: an async RL loop over a colocated Megatron policy and engine, on Ray."""
