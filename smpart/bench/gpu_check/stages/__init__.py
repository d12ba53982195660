"""The stages: each file's `measure` fills a `Record`."""
