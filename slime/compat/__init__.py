"""What plugins written for earlier versions import and a name alone does not give them: other
signatures, sync in place of async, use outside of a run. Each is a thin face of our own code; the
table is in `slime.compat.import_paths`.
"""
