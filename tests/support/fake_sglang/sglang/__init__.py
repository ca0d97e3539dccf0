"""Stands for SGLang in tests on hosts without a GPU: SGLang's command line and requests, our
embedded engine inside.

Put ``tests/support/fake_sglang`` on PYTHONPATH: then ``python -m sglang.launch_server`` is this,
and SGLang 0.5.16 "is installed". A server behaves as the version in ``FAKE_SGLANG_VERSION``. See
`sglang.launch_server` for what is checked.
"""

import os

from slime.processes.host import version_of

__version__ = os.environ.get("FAKE_SGLANG_VERSION", "0.5.16")
RELEASE = version_of(__version__)
