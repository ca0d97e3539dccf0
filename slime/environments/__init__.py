"""Adapters to environment frameworks: tasks in Harbor's format, tasksets of verifiers, servers of
OpenEnv.

Each is a class whose method ``generate`` is a generate function; docs/environments.md says how to
use them. Optional packages are imported when they are needed.
"""
