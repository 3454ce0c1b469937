"""`python -m jaxlora`: the `jaxlora` command."""

import sys

from jaxlora.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
