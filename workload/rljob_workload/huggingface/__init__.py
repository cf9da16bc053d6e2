"""Checkpoints as Hugging Face models: which architecture they are, which tensor becomes which, and the files."""
