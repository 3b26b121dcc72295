"""``python -m tandem``."""

import sys

from tandem.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
