"""Functions that plugins of earlier versions import with another signature, sync in place of async,
or outside of a run. Each calls our own code; `import_paths.toml` lists all names.
"""
