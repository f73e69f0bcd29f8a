"""Runs here are small: tests/quick_runs.py."""

from quick_runs import no_warm_up, one_thread  # noqa: F401
