import sys

from soak.soak import main

if __name__ == "__main__":
    sys.exit(main())
