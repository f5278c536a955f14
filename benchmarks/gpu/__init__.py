"""Decoding at a large model's true size, with acceptance from real text: see `__main__.py`."""
