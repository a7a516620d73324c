import sys

from support.soak.run import main

if __name__ == "__main__":
    sys.exit(main())
