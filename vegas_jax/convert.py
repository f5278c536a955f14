"""Command line that converts checkpoints: `python -m vegas_jax.convert --help` explains it."""

import sys

from vegas_jax.cli.converting import main

if __name__ == "__main__":
    import jax

    jax.config.update("jax_platforms", "cpu")  # no accelerator is needed, nor its memory taken
    sys.exit(main())
