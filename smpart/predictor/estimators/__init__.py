"""Estimators of latency after scikit-learn's contract: ours, and the published forms it is compared with."""
