"""``python -m draft_service``."""

import sys

from draft_service.main import main

if __name__ == "__main__":
    sys.exit(main())
