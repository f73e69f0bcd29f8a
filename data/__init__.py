"""Data: the shard format, encodings, the loader, and the tools that make or fetch shards."""
