"""``python -m lit_vgrpo``."""

import sys

from lit_vgrpo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
