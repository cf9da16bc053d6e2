"""Data sets and tokenizers that come with the trainer."""
