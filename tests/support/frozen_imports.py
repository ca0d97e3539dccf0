"""Importing this excludes all that was imported before from garbage collection: each fork would
look through it, for a third of a second."""

from slime.processes.garbage import freeze_gc

freeze_gc()
