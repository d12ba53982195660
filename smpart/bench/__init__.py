"""Loads, replays, metrics and reports: what a deployment is measured with."""
