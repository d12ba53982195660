"""Measures lanes alone and side by side: samples, timers, sweeps."""
