"""ft_launcher without its console script, which the unpacked wheel does not install."""

import sys

from nvidia_resiliency_ext.fault_tolerance.launcher import main

sys.exit(main())
