"""`smpart report`: one self-contained HTML page from a profile or bench folder."""
