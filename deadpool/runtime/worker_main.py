"""`python -m deadpool.runtime.worker_main`: the training process that an agent starts."""

import sys

from deadpool.runtime.worker import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
