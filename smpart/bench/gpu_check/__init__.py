"""`make gpu-check`: everything that only a GPU can settle, in one run of less than eight minutes.

Each stage is a process of its own with a time limit; what it measured is written down as it goes. A stage that hangs,
crashes or loses the device costs itself and nothing else.
"""
