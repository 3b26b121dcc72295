"""Workers of pytest share the cores: engines that are not told otherwise compute on one thread.

Threads of a pass wait for each other: on cores that others use, a pass of two takes several times that of one.
Imported before the engine is.
"""

import os

from specdec.process import cores

if "PYTEST_XDIST_WORKER" in os.environ:
    cores.usable_cores = lambda: 1
