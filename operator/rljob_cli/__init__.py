"""`rljob` (also `kubectl rljob`): validate manifests, run them on this machine, follow them on a cluster."""
