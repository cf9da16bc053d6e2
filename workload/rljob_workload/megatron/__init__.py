"""Everything that touches Megatron: the policy, its resident engine, and the weights' way to disk and back."""
