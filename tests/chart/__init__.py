"""The Helm charts and the images."""
