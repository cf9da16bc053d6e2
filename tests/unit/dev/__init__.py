"""Scripts of the development machinery."""
