"""Agents that come with the trainer: examples for those who write their own. They know it by HTTP only."""
