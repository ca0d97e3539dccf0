"""Stands for SGLang in tests on hosts without a GPU: SGLang's command line and requests, our
embedded engine inside.

Put ``tests/support/fake_sglang`` on PYTHONPATH: then ``python -m sglang.launch_server`` is this,
and SGLang 0.5.16 "is installed". See `sglang.launch_server` for what is checked.
"""

__version__ = "0.5.16"
