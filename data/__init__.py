"""Data: the shard format, encodings, the loader, and the tools that make or fetch shards."""

import sys

for console in (sys.stdout, sys.stderr):  # of another encoding than UTF-8; none if it is closed
    if hasattr(console, "reconfigure"):
        console.reconfigure(errors="backslashreplace")
