"""Turns a piece of work into CPU or GPU time: model adapter, attention, sampler, workers."""
