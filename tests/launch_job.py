"""`python -m launch_job COMMAND`: `headstart COMMAND`, its ranks starting a second apart."""

import os
import time

from headstart.cli import main

if __name__ == "__main__":
    time.sleep(1.1 * int(os.environ["RANK"]))
    main()
