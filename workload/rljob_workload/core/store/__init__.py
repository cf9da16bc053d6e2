"""The checkpoint store: what a run keeps on its volume, and who may read, write and delete which part of it.

Everything but `filesystem.OsFiles` works on the `Files` interface, so that the tests can stop it between any two operations.
"""
