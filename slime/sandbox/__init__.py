"""A sandbox for code that a model wrote: limits on time, memory, processes, files and network.

sandbox.py ──request──► supervisor.py ──fork──► isolation.py ──exec──► the program
(the rollout) ◄─result── (limits, the end)      (namespaces, or what the kernel allows)

docs/security.md says what is enforced where.
"""
