"""Imported first by every script: replaces the scripts' folder on the search path by the library's
parent, and sets the variables that other libraries read while they are loaded.

So the library beside the scripts is found wherever the project was copied to (`dvc exp run
--temp`), and the script named tokenize does not stand in the way of Python's own module of that
name."""

import os
import sys
import time

BEGAN = time.time_ns()  # what was edited later may not be the code that runs
if os.path.basename(sys.path[0]) == "scripts":
    sys.path[0] = os.path.dirname(os.path.abspath(sys.path[0]))

from eagle3.core import environment  # noqa: E402, F401
