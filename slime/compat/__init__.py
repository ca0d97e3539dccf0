"""Functions that plugins of earlier versions import: with another signature, sync instead of async,
or without a run. Each calls slime's own code; `import_paths.toml` lists all names.
"""
