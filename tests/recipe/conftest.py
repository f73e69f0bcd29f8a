"""Runs small enough that threads would take most of their time."""

from quick_runs import one_thread  # noqa: F401
