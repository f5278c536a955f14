"""Command line that converts checkpoints: `python -m vegas_jax.convert --help` explains it."""

import signal
import sys

from vegas_jax.cli.converting import main

if __name__ == "__main__":
    import jax

    jax.config.update("jax_platforms", "cpu")  # no accelerator is needed, nor its memory taken
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all that is left is to end
    sys.exit(code)
