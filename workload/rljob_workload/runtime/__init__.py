"""The trainer as processes: driver, collector and ranks on Ray, and the ways to start them."""
