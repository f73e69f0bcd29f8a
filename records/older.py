"""Imported before all else of records/: a tool that an older Python has started, which cannot import it, goes on in .venv's; a
file of the project's root that hides a module of Python's, or a package, is named."""

import os
import sys

root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path[:0] = [root]
from launch.environment import go_on

sys.path.remove(root)
if sys.version_info < (3, 11):
    go_on("records/requirements.txt")
