"""Imported before all else of records/: a tool that an older Python has started, which cannot import it, goes on in .venv's."""

import os
import sys

if sys.version_info < (3, 11):
    sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.realpath(__file__)))]
    from launch.environment import go_on

    go_on("records/requirements.txt")
