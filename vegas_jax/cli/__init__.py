"""Pieces of the command lines: flags, prompts in, records out, the terminal."""
