"""Commands behind the Makefile that need more than a shell script."""
