"""Adapters to environments of others: tasks of Harbor's format, verifiers' tasksets, servers of
OpenEnv.

Each is a class whose ``generate`` is a generate function; docs/environments.md says how they are
used. Packages that not everybody has are imported when they are needed.
"""
