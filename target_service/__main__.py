"""``python -m target_service``."""

import sys

from target_service.main import main

if __name__ == "__main__":
    sys.exit(main())
