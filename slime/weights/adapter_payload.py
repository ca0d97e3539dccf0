"""An adapter's tensors in the form that ``/load_lora_adapter_from_tensors`` takes: a pickle of
{name: tensor}, as text.

All tensors lie in one flat buffer. For engines on this host the pickle says how to map it, and they
keep what they have mapped as long as the adapter is loaded: SGLang holds adapters in host memory
and copies them to its GPU when a request asks for them. For others the pickle holds the numbers.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing import reductions

from slime.engines.wire.buckets import TensorEntry, dtype_of, unpack
from slime.weights.ipc import Handle, Opened, storage_handle


class AdapterBuffer:
    """Host memory for one version of an adapter.

    Args:
        entries: of one dtype.
        is_shared: other processes of this host may map it.

    Attributes:
        buffer: uint8 [nbytes].
    """

    def __init__(self, entries: Sequence[TensorEntry], *, is_shared: bool) -> None:
        self.entries = list(entries)
        nbytes = sum(entry.nbytes for entry in entries)
        self._is_shared = is_shared
        if is_shared:
            storage: Any = torch.UntypedStorage
            self.buffer = torch.empty(0, dtype=torch.uint8).set_(
                storage._new_using_filename_cpu(nbytes), 0, (nbytes,), (1,)
            )
        else:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return views into the buffer by name."""
        return dict(unpack(self.buffer, self.entries))

    def payload(self, readers: int) -> str:
        """Return the text for ``serialized_tensors``.

        Args:
            readers: processes that will unpickle it, each of them once.
        """
        tensors = self._mapped(readers) if self._is_shared else self._copied()
        return base64.b64encode(pickle.dumps(tensors)).decode()

    def _copied(self) -> dict[str, torch.Tensor]:
        # a view would take the whole buffer with it
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def _mapped(self, readers: int) -> dict[str, Opened]:
        dtype = dtype_of(self.entries[0].dtype)
        # one object, which a pickle holds once: readers map the buffer once
        whole = Opened(storage_handle(self.buffer, dtype, readers))
        tensors = {}
        for entry, tensor in zip(self.entries, self.tensors().values(), strict=True):
            place = (entry.offset // dtype.itemsize, tensor.size(), tensor.stride(), False)
            handle = Handle(reductions.rebuild_tensor, (torch.Tensor, whole, place))
            tensors[entry.name] = Opened(handle)
        return tensors
