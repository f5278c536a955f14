"""Command line that continues prompts: `python -m vegas_jax.decode --help` explains it.

The work is done in `vegas_jax.cli`, so that nothing has to import this module: as a submodule it
would take the name of the function `vegas_jax.decode`.
"""

import sys

from vegas_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
